"""Run the monitor's evaluator over archived requests, and report what its policies would have done.

The input is the archive files of `monitoring.state.archive`, in a folder or a bucket. The files are
read day by day, in order of event time. Rows that none of our models served are skipped. Clicks
after the attribution window do not change labels, as in the running monitor. At most one day of
rows is in memory.

The output is decision points and one `Backtest` per set of policies. For the same records, the
decision lines equal the lines that the monitor wrote, with two exceptions. First, the monitor
ignored records that arrived after their decision point, and the archive does not show which records
these are. Second, the monitor's settings, verdicts or training profiles may have been different. A
backtest cannot release a model. After a simulated run, a backtest therefore continues with the old
scores, and the same drift can cause a second alarm.
"""

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from evergreen.config.features import MISSING_CATEGORY, Features
from evergreen.config.monitor import DecisionSettings
from evergreen.contracts import raw_rows
from evergreen.contracts.records import NO_POSITION, NO_VERSION, Predictions
from evergreen.registry.promotion_journal import moment_of
from evergreen.rows.archived_rows import ArchivedFile, archived_files, arrow_schema
from evergreen.runtime.errors import ContractError
from evergreen.statistics.reference import TrainingReference
from evergreen.storage.objects import Objects
from monitoring.drift.watch import DriftWatch
from monitoring.policies.evaluation import Evaluator, no_baseline, serving_ahead
from monitoring.policies.policies import make_policies
from monitoring.policies.policy import Action, Baseline, DecisionPoint
from monitoring.policies.rate_limit import PastRuns, apply_limits, ended, requested
from monitoring.rows import MaturedRequests

_NEEDED = (
    raw_rows.LABEL,
    raw_rows.REQUEST_ID,
    raw_rows.ROW,
    raw_rows.EVENT_TIME,
    raw_rows.MODEL_VERSION,
    raw_rows.SCORE,
)


class ArchivedRequests(NamedTuple):
    """Requests of the archive, ordered by time and id."""

    matured: MaturedRequests
    """Requests with final labels, but without positions in ranked lists. `times` are in seconds,
    rounded to whole microseconds."""
    canary: NDArray[np.bool_]
    """For each request, whether a canary served it, shape [m]."""
    predictions: Predictions | None
    """Predictions with features, or None if the caller does not read features."""


class Span(NamedTuple):
    """Range of event times in seconds since the epoch. None means no limit."""

    start: float | None = None
    """Earliest event time, inclusive."""
    end: float | None = None
    """Latest event time, exclusive."""


_WHOLE = Span()


def parse_time(text: str) -> float:
    """Convert an ISO 8601 time or a number of seconds to seconds since the epoch."""
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return moment_of(text).timestamp()
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time, expected ISO 8601 or seconds since the epoch"
        ) from error


def read_requests(
    archive: Objects,
    span: Span = _WHOLE,
    *,
    features: Features | None = None,
    user: str | None = None,
) -> Iterator[ArchivedRequests]:
    """Yield every served request in `span`, ordered by (time, request id), one day at a time.

    Args:
        archive: Archive or lake.
        span: Event times to read.
        features: Names of the features to read, which only the evaluation of drift needs.
        user: User column, or None if the recommender names none.

    Raises:
        ContractError: No file exists, a file is corrupt, or a column is missing or has another
            type.
    """
    for _, table in read_days(archive, span, features=features, user=user):
        if len(table):
            yield _requests(table, features, user)


def read_days(
    archive: Objects,
    span: Span = _WHOLE,
    *,
    features: Features | None = None,
    user: str | None = None,
    newest_first: bool = False,
) -> Iterator[tuple[str, pa.Table]]:
    """Yield each day that overlaps with `span`, with the served rows of the day.

    The rows are ordered by (time, request id, row).

    The arguments and errors are those of `read_requests`.
    """
    by_day: dict[str, list[ArchivedFile]] = {}
    for file in archived_files(archive):
        by_day.setdefault(file.day, []).append(file)
    if not by_day:
        raise ContractError(
            f"{archive.uri} has no day=YYYY-MM-DD/*.parquet, expected a monitor's archive or a lake"
        )
    for day in sorted(by_day, reverse=newest_first):
        if _touches(day, span):
            yield (
                day,
                _served_rows([_raw_columns(file, features, user) for file in by_day[day]], span),
            )


def _touches(day: str, span: Span) -> bool:
    start = np.datetime64(day, "s").astype(np.int64)
    after_start = span.start is None or span.start < start + 86_400
    return bool(after_start and (span.end is None or span.end > start))


def _raw_columns(archived: ArchivedFile, features: Features | None, user: str | None) -> pa.Table:
    """Read the needed columns of one file in the contract's types."""
    if features is None and user is not None:
        features = Features(numeric=(), categorical=(user,))
    wanted = features.names if features else ()
    types = {
        **(raw_rows.raw_types(features) if features else raw_rows.ROW_TYPES),
        **raw_rows.CANARY_TYPES,
    }
    with archived.opened() as file:
        found = file.schema_arrow.names
        if missing := [column for column in _NEEDED if column not in found]:
            raise ContractError(
                f"{archived.uri} lacks column {missing[0]}, expected the raw columns"
            )
        columns = [*_NEEDED, *(column for column in (*wanted, raw_rows.CANARY) if column in found)]
        try:
            schema = arrow_schema({name: types[name] for name in columns})
            table = file.read(columns=columns).select(columns)
            # A feature that was added to the recommender later is missing in older rows.
            for name in wanted:
                if name not in found:
                    schema = schema.append(arrow_schema({name: types[name]}).field(0))
                    table = table.append_column(
                        schema.field(name), pa.nulls(len(table), schema.field(name).type)
                    )
            # Rows that people ingested into a lake may contain string categories. Rows that people
            # ingested have no model version.
            return table.filter(pc.is_valid(table[raw_rows.MODEL_VERSION])).cast(schema)
        except ValueError as error:
            raise ContractError(
                f"{archived.uri} has other columns than a monitor's archive: {error}"
            ) from error


def _served_rows(tables: Sequence[pa.Table], span: Span) -> pa.Table:
    """Select one day's rows that have a score and a model version and are in `span`.

    The result is ordered by (time, request id, row).
    """
    table = pa.concat_tables(tables, promote_options="default")
    served = pc.and_(pc.is_valid(table[raw_rows.SCORE]), pc.is_valid(table[raw_rows.MODEL_VERSION]))
    micros = pc.cast(table[raw_rows.EVENT_TIME], pa.int64())
    for bound, keeps in ((span.start, pc.greater_equal), (span.end, pc.less)):
        if bound is not None:
            served = pc.and_(served, keeps(micros, raw_rows.microseconds(bound)))
    order = [
        (raw_rows.EVENT_TIME, "ascending"),
        (raw_rows.REQUEST_ID, "ascending"),
        (raw_rows.ROW, "ascending"),
    ]
    return table.filter(served).sort_by(order).combine_chunks()


def _requests(table: pa.Table, features: Features | None, user: str | None) -> ArchivedRequests:
    times = table[raw_rows.EVENT_TIME].cast(pa.int64()).to_numpy()
    names = np.asarray(table[raw_rows.REQUEST_ID].to_pylist(), object)
    starts = np.flatnonzero(np.r_[True, (times[1:] != times[:-1]) | (names[1:] != names[:-1])])
    n = len(table)
    of_requests = {
        "ids": names[starts],
        "times": times[starts] / 1e6,
        "versions": table[raw_rows.MODEL_VERSION].to_numpy()[starts],
        "sizes": np.diff(starts, append=n),
        "scores": table[raw_rows.SCORE].to_numpy().astype(np.float32),
        "positions": np.full(n, NO_POSITION, np.int32),
    }
    matured = MaturedRequests(
        **of_requests,
        numbers=np.arange(len(starts)),
        labels=table[raw_rows.LABEL].to_numpy().astype(np.uint8),
        click_delays=np.full(n, np.nan, np.float32),
        users=np.full(n, MISSING_CATEGORY)
        if user is None
        else table[user].fill_null(MISSING_CATEGORY).to_numpy(),
    )
    canary = np.zeros(len(starts), np.bool_)
    if raw_rows.CANARY in table.column_names:
        canary = table[raw_rows.CANARY].fill_null(False).to_numpy()[starts]
    predictions = None
    if features is not None:
        batch = table.to_batches()[0]
        predictions = Predictions(
            **of_requests,
            canary=canary,
            dense=raw_rows.feature_matrix(batch, features.numeric, "float32", missing=np.nan),
            categorical=raw_rows.category_matrix(batch, features),
            propensities=np.full(n, np.nan),
            shadow_versions=np.full(len(starts), NO_VERSION, np.int32),
            shadow_scores=np.full(n, np.nan, np.float32),
        )
    return ArchivedRequests(matured, canary, predictions)


def no_reference(version: int) -> TrainingReference | None:
    """Return no training profile for any version."""
    return None


def evaluate_requests(
    requests: Iterable[ArchivedRequests],
    settings: DecisionSettings,
    *,
    baseline: Callable[[int], Baseline | None] = no_baseline,
    reference: Callable[[int], TrainingReference | None] = no_reference,
    features: Features | None = None,
    state: Mapping[str, Any] | None = None,
) -> Iterator[DecisionPoint]:
    """Yield the decision points of `requests`, which are ordered by (time, request id).

    `state` continues an earlier evaluation. Requests up to the last decision point of that
    evaluation are added to the windows without a decision. Decisions are made only for later
    requests.

    Args:
        requests: Archived requests.
        settings: Rules of the monitor.
        baseline: Returns the baseline of a version.
        reference: Returns the training profile of a version. The function is called only for
            requests with features.
        features: Columns of the requests' features.
        state: Saved state of an evaluator, from which the evaluation continues.
    """
    evaluator = Evaluator(
        settings.evaluation,
        make_policies(settings.policies, settings.baking),
        baseline=baseline,
        state=state,
    )
    stream = _Stream(evaluator, DriftWatch(reference, settings.drift, features=features), settings)
    # Advance at least once per drift bucket, because only a few buckets can be open at a time.
    step = settings.drift.drift_bucket_seconds or settings.evaluation.decide_seconds
    passed: float | None = None
    for archived in requests:
        times, start = archived.matured.times, 0
        while start < len(times):
            time = float(times[start])
            if passed is None or time >= passed + step:
                if passed is not None:
                    yield from stream.decide_until(time)
                passed = time
            stop = int(np.searchsorted(times, passed + step))
            stream.add(archived, start, stop)
            start = stop
    yield from stream.end()


class _Stream:
    """Adds requests to an evaluator and a drift watch, in order of event time."""

    def __init__(self, evaluator: Evaluator, watch: DriftWatch, settings: DecisionSettings) -> None:
        self._evaluator = evaluator
        self._watch = watch
        self._settings = settings
        self._warm: list[MaturedRequests] = []
        self._newest: float | None = None
        decided = evaluator.decided_until
        self._decided = -math.inf if decided is None else decided
        self._known_until = self._decided + serving_ahead(settings.evaluation)
        """Predictions up to this event time are already included in the evaluator's state. The
        predictions determine the serving version."""
        window, grace = (
            settings.evaluation.attribution_window_seconds,
            settings.evaluation.drift_grace_seconds,
        )
        self._drift_known_until = self._decided + window - grace
        """Drift reports up to this event time are already included in the evaluator's state."""

    def add(self, archived: ArchivedRequests, start: int, stop: int) -> None:
        """Add the requests with indexes from `start` to before `stop`."""
        matured = archived.matured.between(start, stop)
        self._newest = float(matured.times[-1])
        is_new = matured.times > self._known_until
        canary = archived.canary[start:stop][is_new]
        self._evaluator.record_predictions(
            matured.times[is_new], matured.versions[is_new], canary=canary
        )
        if archived.predictions is not None:
            self._watch.observe(archived.predictions.between(start, stop))
        warm = int(np.searchsorted(matured.times, self._decided, "right"))
        if warm:
            self._warm.append(matured.between(0, warm))
        if warm < len(matured):
            self._restore()
            self._evaluator.observe(matured.between(warm, len(matured)))

    def decide_until(self, predicted_until: float) -> Iterator[DecisionPoint]:
        """Decide on all rows whose labels are final.

        Every prediction before `predicted_until` must have been added.
        """
        before = predicted_until - 1e-6  # further requests may have the same microsecond
        for report in self._watch.close(before - self._settings.evaluation.drift_grace_seconds):
            if report.bucket_end > self._drift_known_until:
                self._evaluator.record_drift(report.evidence())
        final_until = before - self._settings.evaluation.attribution_window_seconds
        if final_until > self._decided:
            self._restore()
            yield from self._evaluator.decide_up_to(final_until)

    def end(self) -> Iterator[DecisionPoint]:
        """Decide on the remaining requests, as if the last bucket and decision point had ended."""
        if self._newest is not None:
            evaluation, drift = self._settings.evaluation, self._settings.drift
            yield from self.decide_until(
                self._newest + drift.drift_bucket_seconds + evaluation.drift_grace_seconds
            )
            last = self._newest + evaluation.decide_seconds
            yield from self.decide_until(last + evaluation.attribution_window_seconds)

    def _restore(self) -> None:
        if self._warm:
            self._evaluator.restore(MaturedRequests.joined(self._warm))
            self._warm = []


@dataclass(frozen=True, kw_only=True)
class Fire:
    """Retrain request that the monitor would have made."""

    time: float
    """Time of the decision, one attribution window after its decision point, in seconds since the
    epoch."""
    version: int
    policy: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Backtest:
    """Result of one set of policies."""

    policies: str
    decision_points: int
    rows: int
    """Number of matured rows."""
    fires: tuple[Fire, ...]
    held: int
    """Number of decision points at which the cooldown or the budget prevented a run."""
    false_alarms: int | None
    """Number of alarms before the drift, or None if the time of the drift is unknown."""
    delay_seconds: float | None
    """Seconds from the drift to the first alarm after it. None if the time of the drift is unknown,
    or if no alarm followed."""


def backtest(
    points: Iterable[DecisionPoint],
    settings: DecisionSettings,
    *,
    run_seconds: float,
    drift_at: float | None = None,
) -> Backtest:
    """Apply the monitor's cooldowns and budget to decision points under a virtual clock.

    Args:
        points: Decision points in order.
        settings: Rules of the monitor.
        run_seconds: Seconds from a decision to retrain to the release of the run. No other run is
            requested before the release, and the cooldown begins at the release.
        drift_at: Time of the known change in seconds since the epoch. If None, the backtest counts
            no false alarms.
    """
    past_runs = PastRuns()
    running_until = -math.inf
    held = decision_points = rows = 0
    fires: list[Fire] = []
    for point in points:
        decision_points += 1
        rows = int(point.state["matured_total"])
        # The monitor would have decided at this time.
        now = point.time + settings.evaluation.attribution_window_seconds
        if now < running_until:
            held += point.decision.action is Action.RETRAIN
            continue
        decision = apply_limits(point.decision, past_runs, settings.rate_limit, now=now)
        held += decision.action is Action.HELD
        if decision.action is Action.RETRAIN:
            fires.append(
                Fire(
                    time=now, version=point.version, policy=decision.policy, reason=decision.reason
                )
            )
            running_until = now + run_seconds
            past_runs = ended(
                requested(past_runs, now=now), "released", settings.rate_limit, now=running_until
            )
    found = (
        None if drift_at is None else next((fire for fire in fires if fire.time >= drift_at), None)
    )
    return Backtest(
        policies=settings.policies.policies,
        decision_points=decision_points,
        rows=rows,
        fires=tuple(fires),
        held=held,
        false_alarms=None if drift_at is None else sum(fire.time < drift_at for fire in fires),
        delay_seconds=found.time - drift_at if found and drift_at is not None else None,
    )
