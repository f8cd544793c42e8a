"""Read a canary's evidence: pairs of scores with labels, and the servers' counters of each arm.

A pair is a row that both the stable version and the canary scored. Pairs are read from the
monitor's archive and the lake, which contain the matured rows. The choice of requests for shadow
scoring depends neither on the arm nor on the rows, so either arm may have served the row. The rows
of a ranked list were chosen by the serving arm, so ranked lists have no shadow columns
(`monitoring.state.archive`). If all traffic is ranked, there are no pairs, and a person advances
the canary.

Counters are read from every replica's Prometheus text. Counters only grow, so the counts of a stage
are the differences to the plan's `baseline`. The differences are summed over the replicas before
any division, which avoids a mean of means. The counters of a new or restarted server include its
warm-up, which is slow (measured: 70 requests at three times the usual time). The warm-up requests
would weigh more in the smaller arm. A server without a recorded baseline is therefore left out
(`uncounted`) until the next step records a baseline for it. When a server leaves, its requests are
no longer in the counts of either arm. A restarted server counts from 0 again. If the new counters
have passed the recorded baseline by the next step, the restart is not detected. The counts of both
arms are then too low, but never negative.

Triton reports totals and no medians. The p99 is therefore read in two forms. The quantiles of a
server (`QUANTILES`) cannot be summed over servers. The buckets of a histogram (`HISTOGRAM`) can be
summed. The sums give one p99 of all servers. Triton 2.51 has the histogram only for decoupled
models, and Triton 26.01 and later for all (triton-inference-server/server#8580). The histogram is
off unless the server has the flag `--metrics-config=histogram_latencies=true`. Triton's default
buckets begin at 100 ms, so the configuration of our models sets finer ones. The histogram counts
whole milliseconds, so two versions whose p99 differs by less than 1 ms may have equal counts.

Requests that are rejected before they reach a model are not counted. Requests that the response
cache answers count as successful. `evergreen.serving.canary_policy` decides from this evidence.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from http.client import HTTPException
from typing import Any
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from prometheus_client.parser import text_string_to_metric_families

from evergreen.contracts import raw_rows
from evergreen.registry.traffic_plan import CANARY, STABLE, Arm, Baseline
from evergreen.rows.archived_rows import ArchivedFile, MovedAway, archived_files, arrow_schema
from evergreen.runtime.errors import ContractError, TemporaryError, first_line
from evergreen.serving.canary_policy import ArmCounts, BothCounts, Pairs
from evergreen.storage.objects import Objects

logger = logging.getLogger(__name__)

COLUMNS = (
    raw_rows.REQUEST_ID,
    raw_rows.ROW,
    raw_rows.EVENT_TIME,
    raw_rows.LABEL,
    raw_rows.MODEL_VERSION,
    raw_rows.SCORE,
    raw_rows.SHADOW_VERSION,
    raw_rows.SHADOW_SCORE,
)
COUNTERS = {
    "success": "nv_inference_request_success",
    "failure": "nv_inference_request_failure",
    "infer_us": "nv_inference_compute_infer_duration_us",
    "cache_hits": "nv_cache_num_hits_per_model",
}
"""Triton's name of each counter. `infer_us` is the total inference time of all computed
requests."""
QUANTILES = "nv_inference_compute_infer_summary_us"
"""Triton's quantiles of the inference time, computed over the requests of the last minute on one
server."""
HISTOGRAM = "nv_inference_first_response_histogram_ms"
"""Triton's histogram of the total request time, including the time in the queue."""
READ_SECONDS = 10.0
MAX_TEXT_BYTES = 32 << 20
"""Size limit of a metrics text in bytes. Triton writes about 100 bytes per counter, and a few dozen
counters per model and version."""
_MAX_COUNT = float(1 << 63)
_NAMES = {name: short for short, name in COUNTERS.items()}

Fetch = Callable[[str], str]
"""Function that returns the metrics text of host:port."""


def read_pairs(
    folders: Sequence[Objects],
    *,
    stable: int,
    canary: int,
    since: datetime,
    max_pairs: int,
    user: str | None = None,
) -> Pairs:
    """Read the oldest pairs of two versions.

    A file may move from the archive to the lake during the read. If the archive comes first in
    `folders`, such a file is read at least once. Memory grows with `max_pairs`, and not with the
    lake. The files of a lake in a bucket are downloaded one by one. A corrupt file is logged as a
    warning and skipped.

    Args:
        folders: The monitor's archive and the lake.
        stable: Stable version.
        canary: Version of the canary.
        since: Earliest event time.
        max_pairs: Maximum number of pairs.
        user: Column of the users. None = the recommender has no user column.

    Raises:
        TemporaryError, PermanentError: the bucket cannot be read.
    """
    types = {**raw_rows.ROW_TYPES, **raw_rows.SHADOW_TYPES}
    schema = arrow_schema(
        {name: types[name] for name in COLUMNS} | ({} if user is None else {user: "int64"})
    )
    found = [schema.empty_table()]
    first_day = since.astimezone(timezone.utc).date().isoformat()
    for folder in folders:
        for archived in archived_files(folder, first_day=first_day):
            if (rows := _shadow_rows(archived, schema)) is not None:
                found.append(_rows_of_pair(rows, stable=stable, canary=canary, since=since))
                if sum(table.num_rows for table in found) > 4 * max_pairs:
                    found = [_oldest(found, max_pairs)]
    return _paired(_oldest(found, max_pairs), stable, user).first(max_pairs)


def _rows_of_pair(rows: Any, *, stable: int, canary: int, since: datetime) -> Any:
    served, shadow = rows[raw_rows.MODEL_VERSION], rows[raw_rows.SHADOW_VERSION]
    by_stable = pc.and_(pc.equal(served, stable), pc.equal(shadow, canary))
    by_canary = pc.and_(pc.equal(served, canary), pc.equal(shadow, stable))
    recent = pc.greater_equal(
        rows[raw_rows.EVENT_TIME], pa.scalar(since, rows.schema.field(raw_rows.EVENT_TIME).type)
    )
    return rows.filter(pc.and_(recent, pc.or_(by_stable, by_canary)))


def _oldest(tables: Sequence[Any], max_pairs: int) -> Any:
    """Return the oldest rows, sorted by time.

    Twice as many rows as wanted are returned, because both the archive and the lake may contain a
    row.
    """
    keys = [raw_rows.EVENT_TIME, raw_rows.REQUEST_ID, raw_rows.ROW]
    return (
        pa.concat_tables(tables)
        .sort_by([(key, "ascending") for key in keys])
        .slice(0, 2 * max_pairs)
    )


def _shadow_rows(archived: ArchivedFile, schema: Any) -> Any:
    """Return the columns of one file, or None if it has no shadow scores, has moved or is corrupt.

    Older files may lack the column of the users. The values of this column are then null.
    """
    try:
        with archived.opened() as file:
            if raw_rows.SHADOW_SCORE not in file.schema_arrow.names:
                return None
            rows = file.read(
                columns=[name for name in schema.names if name in file.schema_arrow.names]
            )
            columns = [
                rows[each.name].cast(each.type)
                if each.name in rows.column_names
                else pa.nulls(len(rows), each.type)
                for each in schema
            ]
    except MovedAway:
        return None
    except ContractError as error:
        logger.warning("a file is left out of the canary's evidence: %s", error)
        return None
    return pa.table(columns, schema=schema)


def _paired(rows: Any, stable: int, user: str | None) -> Pairs:
    """Build the pairs from rows sorted by time.

    If several rows have the same identity, only the first of them is used.
    """
    requests, codes = np.unique(
        rows[raw_rows.REQUEST_ID].to_numpy().astype(str), return_inverse=True
    )
    codes = codes.reshape(-1).astype(np.int64)
    positions = rows[raw_rows.ROW].to_numpy().astype(np.int64)
    _, first = np.unique(np.stack([codes, positions], axis=1), axis=0, return_index=True)
    at = np.sort(first)
    served, shadow = (rows[name].to_numpy()[at] for name in (raw_rows.SCORE, raw_rows.SHADOW_SCORE))
    by_stable = rows[raw_rows.MODEL_VERSION].to_numpy()[at] == stable
    groups = codes
    if (
        user is not None
    ):  # user ids are not negative, so a negative number marks a request without a user
        groups = pc.coalesce(rows[user], pa.array(-1 - codes)).to_numpy()
    return Pairs(
        labels=rows[raw_rows.LABEL].to_numpy()[at].astype(np.uint8),
        stable=np.where(by_stable, served, shadow).astype(np.float32),
        canary=np.where(by_stable, shadow, served).astype(np.float32),
        groups=groups[at],
    )


def fetch(address: str) -> str:
    """Return the metrics text of the server with the metrics port `address` (host:port).

    Raises:
        TemporaryError: the server does not answer, or its text is too long.
    """
    deadline, content = time.monotonic() + READ_SECONDS, bytearray()
    try:
        # Bypass any proxy in the environment, because the server is on this machine or in this
        # cluster.
        with build_opener(ProxyHandler({})).open(
            f"http://{address}/metrics", timeout=READ_SECONDS
        ) as answer:
            while chunk := answer.read1(1 << 16):
                content += chunk
                if len(content) > MAX_TEXT_BYTES or time.monotonic() > deadline:
                    raise TemporaryError(
                        f"metrics of {address} are incomplete after {len(content):,} bytes, "
                        f"expected at most {MAX_TEXT_BYTES:,} bytes within {READ_SECONDS:g} s"
                    )
            return content.decode()
    except (URLError, HTTPException, OSError, ValueError) as error:
        raise TemporaryError(f"metrics of {address} cannot be read: {error}") from error


def read_baseline(
    addresses: Sequence[str], stable: Arm, canary: Arm, *, fetch: Fetch = fetch
) -> Baseline:
    """Return every server's current counters of both arms.

    Raises:
        TemporaryError: a server does not answer, or sends an unexpected text.
    """
    arms = {STABLE: stable, CANARY: canary}
    return {address: counted(fetch(address), arms, source=address) for address in addresses}


def counted(
    text: str, arms: Mapping[str, Arm], *, source: str = "server"
) -> dict[str, dict[str, float]]:
    """Return the counters of each arm's model and version in a metrics text. Absent counters are 0.

    Raises:
        TemporaryError: `text` is not a metrics text, or a counter is negative or not finite. The
            message contains `source`.
    """
    found = {name: dict.fromkeys(COUNTERS, 0.0) for name in arms}
    for arm, sample in _samples(text, arms, source):
        name = sample.name.removesuffix(
            "_total"
        )  # the parser appends `_total`, as OpenMetrics requires
        if name in _NAMES:
            if not 0 <= sample.value < _MAX_COUNT:
                raise TemporaryError(
                    f"metrics of {source} cannot be read: {name} is {sample.value}, expected a "
                    "count from 0"
                )
            found[arm][_NAMES[name]] += (
                sample.value
            )  # the metrics text has one line per reason of a failure
    return found


def read_p99(text: str, arm: Arm, *, source: str = "server") -> float | None:
    """Return the p99 of the server's inference time in microseconds, over the last minute.

    Returns None if there were no requests, or if the server has no quantiles. Triton computes
    quantiles only if they are enabled, and never for a model with a response cache.

    Raises:
        TemporaryError: `text` is not a metrics text. The message contains `source`.
    """
    for _, sample in _samples(text, {"": arm}, source):
        if (
            sample.name == QUANTILES
            and sample.labels.get("quantile") == "0.99"
            and 0 <= sample.value < math.inf
        ):
            return float(sample.value)
    return None


def read_buckets(text: str, arm: Arm, *, source: str = "server") -> dict[str, float] | None:
    """Return the cumulative number of requests by upper bound in milliseconds, such as "2.5".

    The last bound is "+Inf". Returns None if the server has no histogram.

    Raises:
        TemporaryError: `text` is not a metrics text. The message contains `source`.
    """
    found = {
        sample.labels.get("le", ""): float(sample.value)
        for _, sample in _samples(text, {"": arm}, source)
        if sample.name == f"{HISTOGRAM}_bucket"
    }
    return found if "+Inf" in found else None


def bucket_quantile(buckets: Mapping[str, float], quantile: float) -> float | None:
    """Return a quantile in milliseconds, interpolated in its bucket as in PromQL.

    Triton observes whole milliseconds, rounded down (`UpdateResponseMetrics` in its core). A bucket
    with the upper bound `b` therefore contains all requests below `floor(b) + 1` milliseconds.

    If the quantile is above the largest finite bucket, returns the end of this bucket. Returns None
    without requests or without a finite bound.

    >>> bucket_quantile({"0.5": 50.0, "1.0": 100.0, "+Inf": 100.0}, 0.99)
    1.98
    >>> bucket_quantile({"1.0": 50.0, "+Inf": 100.0}, 0.99)
    2.0
    """
    bounds = sorted((float(bound), count) for bound, count in buckets.items())
    total = bounds[-1][1] if bounds else 0.0
    if total <= 0 or len(bounds) < 2:
        return None
    below, lower = 0.0, 0.0
    for bound, count in bounds[:-1]:
        upper = math.floor(bound) + 1.0
        if count >= quantile * total:
            share = (quantile * total - below) / (count - below) if count > below else 1.0
            return lower + share * (upper - lower)
        below, lower = count, upper
    return lower


def _samples(text: str, arms: Mapping[str, Arm], source: str) -> list[tuple[str, Any]]:
    """Return the metric samples of both arms. Each sample comes with the name of its arm."""
    wanted = {(arm.model_name, str(arm.version)): name for name, arm in arms.items()}
    try:
        samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]
    except ValueError as error:
        raise TemporaryError(f"metrics of {source} cannot be read: {first_line(error)}") from error
    named = [
        (wanted.get((each.labels.get("model", ""), each.labels.get("version", ""))), each)
        for each in samples
    ]
    return [(name, sample) for name, sample in named if name is not None]


def counts_since(baseline: Baseline, now: Baseline) -> BothCounts:
    """Return each arm's counts since `baseline`, summed over the servers that have a baseline.

    Servers that are new or were restarted are left out.
    """
    sums = {arm: dict.fromkeys(COUNTERS, 0.0) for arm in (STABLE, CANARY)}
    for address in now.keys() - uncounted(baseline, now).keys():
        for arm, counters in now[address].items():
            for name in COUNTERS:
                sums[arm][name] += counters[name] - baseline[address][arm].get(name, 0.0)
    return BothCounts(stable=ArmCounts(**sums[STABLE]), canary=ArmCounts(**sums[CANARY]))


def uncounted(baseline: Baseline, now: Baseline) -> Baseline:
    """Return the new or restarted servers, which need their current counters as a baseline.

    A restart is detected if a counter of either arm is below its baseline.
    """
    return {
        address: arms
        for address, arms in now.items()
        if any(
            _is_fresh(baseline.get(address, {}).get(arm), counters)
            for arm, counters in arms.items()
        )
    }


def _is_fresh(before: Mapping[str, float] | None, now: Mapping[str, float]) -> bool:
    return before is None or any(now[name] < before.get(name, 0.0) for name in COUNTERS)
