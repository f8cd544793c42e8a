"""What a canary is judged by: pairs of scores with their outcomes, and what the servers counted for each arm.

Pairs are rows that stable and canary both scored, read where the monitor leaves matured rows, the archive and the lake.
A row counts whichever arm served it: requests are drawn for the shadow alike in both arms, and nobody chose their rows.
Ranked lists, whose rows the serving arm chose, have no shadow columns there (`monitoring.state.archive`), so where all
traffic is ranked there are no pairs, and a person advances the canary.

Counts are read from Triton's Prometheus text of every replica. Counters only grow, so a stage is the difference to the
plan's `baseline`, summed over replicas before anything is divided: never a mean of means. A server that appeared since,
or whose counter is below its baseline because it restarted, has counted its warm-up, which is slow (measured: 70
requests of three times the usual time) and weighs more in the small arm: it counts nothing until a step has taken its
baseline (`uncounted`). A server that left takes both arms' counts with it. A server that restarted and has counted past
its whole baseline by the next step is not noticed; its arms are counted short, never negative.

What these numbers are not: Triton has totals and no medians; a request refused before it reached a model is in none of
them. Requests that the response cache answers are among the successful ones. What follows from the evidence is
`serving.canary_policy`'s.
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
"""Triton's name of each counter; `infer_us` adds up the time in the model of the requests that it computed."""
QUANTILES = "nv_inference_compute_infer_summary_us"
"""Triton's quantiles of what `infer_us` adds up, one server's requests of the last minute."""
READ_SECONDS = 10.0
MAX_TEXT_BYTES = 32 << 20
"""Triton writes some 100 bytes a counter, and a few dozen counters a model and version."""
_MAX_COUNT = float(1 << 63)
_NAMES = {name: short for short, name in COUNTERS.items()}

Fetch = Callable[[str], str]
"""The metrics text of host:port."""


def read_pairs(
    places: Sequence[Objects], *, stable: int, canary: int, since: datetime, most: int, user: str | None = None
) -> Pairs:
    """The oldest pairs of two versions in `places` with an event time of `since` or later.

    A file may move from the archive to the lake meanwhile: name the archive first, and it is seen at least once. Memory
    grows with `most`, not with the lake; of a lake in a bucket the files of these days are fetched one by one. `user`
    is the column of the users; None = the recommender names none.

    A damaged file is no evidence: a warning names it, and the pairs are those of the other files.

    Raises:
        TemporaryError, PermanentError: the bucket cannot be read.
    """
    types = {**raw_rows.ROW_TYPES, **raw_rows.SHADOW_TYPES}
    schema = arrow_schema({name: types[name] for name in COLUMNS} | ({} if user is None else {user: "int64"}))
    found = [schema.empty_table()]
    first_day = since.astimezone(timezone.utc).date().isoformat()
    for place in places:
        for archived in archived_files(place, first_day=first_day):
            if (rows := _shadow_rows(archived, schema)) is not None:
                found.append(_rows_of_pair(rows, stable=stable, canary=canary, since=since))
                if sum(table.num_rows for table in found) > 4 * most:
                    found = [_oldest(found, most)]
    return _paired(_oldest(found, most), stable, user).first(most)


def _rows_of_pair(rows: Any, *, stable: int, canary: int, since: datetime) -> Any:
    served, shadow = rows[raw_rows.MODEL_VERSION], rows[raw_rows.SHADOW_VERSION]
    by_stable = pc.and_(pc.equal(served, stable), pc.equal(shadow, canary))
    by_canary = pc.and_(pc.equal(served, canary), pc.equal(shadow, stable))
    recent = pc.greater_equal(rows[raw_rows.EVENT_TIME], pa.scalar(since, rows.schema.field(raw_rows.EVENT_TIME).type))
    return rows.filter(pc.and_(recent, pc.or_(by_stable, by_canary)))


def _oldest(tables: Sequence[Any], most: int) -> Any:
    """Twice as many rows as are wanted, sorted by time: archive and lake may both hold a row."""
    keys = [raw_rows.EVENT_TIME, raw_rows.REQUEST_ID, raw_rows.ROW]
    return pa.concat_tables(tables).sort_by([(key, "ascending") for key in keys]).slice(0, 2 * most)


def _shadow_rows(archived: ArchivedFile, schema: Any) -> Any:
    """Return the columns of one file, or None if it holds no shadow scores, has moved on or cannot be read.

    Users may have come later.
    """
    try:
        with archived.opened() as file:
            if raw_rows.SHADOW_SCORE not in file.schema_arrow.names:
                return None
            rows = file.read(columns=[name for name in schema.names if name in file.schema_arrow.names])
    except MovedAway:
        return None
    except ContractError as error:
        logger.warning("a canary's rows are read without a file that cannot be read: %s", error)
        return None
    columns = [
        rows[each.name].cast(each.type) if each.name in rows.column_names else pa.nulls(len(rows), each.type)
        for each in schema
    ]
    return pa.table(columns, schema=schema)


def _paired(rows: Any, stable: int, user: str | None) -> Pairs:
    """Both arms' scores of rows sorted by time; of rows with one identity the first stays."""
    requests, codes = np.unique(rows[raw_rows.REQUEST_ID].to_numpy().astype(str), return_inverse=True)
    codes = codes.reshape(-1).astype(np.int64)
    positions = rows[raw_rows.ROW].to_numpy().astype(np.int64)
    _, first = np.unique(np.stack([codes, positions], axis=1), axis=0, return_index=True)
    at = np.sort(first)
    served, shadow = (rows[name].to_numpy()[at] for name in (raw_rows.SCORE, raw_rows.SHADOW_SCORE))
    by_stable = rows[raw_rows.MODEL_VERSION].to_numpy()[at] == stable
    groups = codes
    if user is not None:  # whose category is at least 0
        groups = pc.coalesce(rows[user], pa.array(-1 - codes)).to_numpy()
    return Pairs(
        labels=rows[raw_rows.LABEL].to_numpy()[at].astype(np.uint8),
        stable=np.where(by_stable, served, shadow).astype(np.float32),
        canary=np.where(by_stable, shadow, served).astype(np.float32),
        groups=groups[at],
    )


def fetch(address: str) -> str:
    """The metrics text of the server whose metrics port is `address` (host:port).

    Raises:
        TemporaryError: it does not answer.
    """
    deadline, content = time.monotonic() + READ_SECONDS, bytearray()
    try:
        # Never through the proxy that the environment may name: the server is on this machine or in this cluster.
        with build_opener(ProxyHandler({})).open(f"http://{address}/metrics", timeout=READ_SECONDS) as answer:
            while chunk := answer.read1(1 << 16):
                content += chunk
                if len(content) > MAX_TEXT_BYTES or time.monotonic() > deadline:
                    raise TemporaryError(
                        f"metrics of {address} go on after {len(content):,} bytes, expected their end within "
                        f"{MAX_TEXT_BYTES:,} bytes and {READ_SECONDS:g} s"
                    )
            return content.decode()
    except (URLError, HTTPException, OSError, ValueError) as error:
        raise TemporaryError(f"metrics of {address} cannot be read: {error}") from error


def read_baseline(addresses: Sequence[str], stable: Arm, canary: Arm, *, fetch: Fetch = fetch) -> Baseline:
    """What every server has counted so far for both arms.

    Raises:
        TemporaryError: a server does not answer, or with something else.
    """
    arms = {STABLE: stable, CANARY: canary}
    return {address: counted(fetch(address), arms, source=address) for address in addresses}


def counted(text: str, arms: Mapping[str, Arm], *, source: str = "server") -> dict[str, dict[str, float]]:
    """The counters of each arm's model and version in a metrics text; what is not in it has counted nothing.

    Raises:
        TemporaryError: it is no metrics text, or a counter is no number from 0; names its `source`.
    """
    found = {name: dict.fromkeys(COUNTERS, 0.0) for name in arms}
    for arm, sample in _samples(text, arms, source):
        name = sample.name.removesuffix("_total")  # which the parser appends, as OpenMetrics wants it
        if name in _NAMES:
            if not 0 <= sample.value < _MAX_COUNT:
                raise TemporaryError(
                    f"metrics of {source} cannot be read: {name} is {sample.value}, expected a count from 0"
                )
            found[arm][_NAMES[name]] += sample.value  # failures have one line per reason
    return found


def read_p99(text: str, arm: Arm, *, source: str = "server") -> float | None:
    """Microseconds in the model that 1 % of the server's requests of the last minute exceed; None without any.

    None also where the server keeps no quantiles: it does not by itself, nor where the response cache may answer.

    Raises:
        TemporaryError: it is no metrics text; names its `source`.
    """
    for _, sample in _samples(text, {"": arm}, source):
        if sample.name == QUANTILES and sample.labels.get("quantile") == "0.99" and 0 <= sample.value < math.inf:
            return float(sample.value)
    return None


def _samples(text: str, arms: Mapping[str, Arm], source: str) -> list[tuple[str, Any]]:
    """The samples of each arm's model and version, with the arm's name."""
    wanted = {(arm.model_name, str(arm.version)): name for name, arm in arms.items()}
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except ValueError as error:
        raise TemporaryError(f"metrics of {source} cannot be read: {first_line(error)}") from error
    named = [(wanted.get((each.labels.get("model", ""), each.labels.get("version", ""))), each) for each in samples]
    return [(name, sample) for name, sample in named if name is not None]


def counts_since(baseline: Baseline, now: Baseline) -> BothCounts:
    """What each arm counted between `baseline` and `now`, over the servers that are in both and did not restart."""
    sums = {arm: dict.fromkeys(COUNTERS, 0.0) for arm in (STABLE, CANARY)}
    for address in now.keys() - uncounted(baseline, now).keys():
        for arm, counters in now[address].items():
            for name in COUNTERS:
                sums[arm][name] += counters[name] - baseline[address][arm].get(name, 0.0)
    return BothCounts(stable=ArmCounts(**sums[STABLE]), canary=ArmCounts(**sums[CANARY]))


def uncounted(baseline: Baseline, now: Baseline) -> Baseline:
    """Those servers of `now` that need it as their baseline: they are new, or restarted, which either arm shows."""
    return {
        address: arms
        for address, arms in now.items()
        if any(_is_fresh(baseline.get(address, {}).get(arm), counters) for arm, counters in arms.items())
    }


def _is_fresh(before: Mapping[str, float] | None, now: Mapping[str, float]) -> bool:
    return before is None or any(now[name] < before.get(name, 0.0) for name in COUNTERS)
