"""A monitor with an injected clock and a real SQLite log, and records with known labels."""

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from evergreen.config.features import MISSING_CATEGORY, Features
from evergreen.config.reader import make_settings
from evergreen.config.spec import Recommender
from evergreen.contracts.manifests import RetrainRequest
from evergreen.contracts.record_format import RecordFormat
from evergreen.contracts.records import (
    CLICK,
    NO_POSITION,
    OutcomeBatch,
    PredictionBatch,
    Predictions,
    record_id,
)
from evergreen.events.sqlite import SqliteLog
from evergreen.runtime.durable import no_checkpoint
from monitoring.monitor import Monitor
from monitoring.retraining.triggers import RunState
from monitoring.rows import MaturedRequests
from monitoring.settings import MonitorSettings
from monitoring.state.store import StateStore
from testing.recommenders import SHOP, draw_arrays
from tests.support.clocks import Clock
from tests.support.record_messages import FORM

START = 1_763_000_000.0
WINDOW = 60.0


@dataclass
class FakeTrigger:
    """A trigger that accepts one run, refuses a second run and records its calls."""

    answers: list[str] = field(default_factory=list)
    runs: dict[str, RunState] = field(default_factory=dict)
    requests: list = field(default_factory=list)
    poll_seconds: float = 0.0

    def submit(self, request) -> str:
        if request.request_id in self.runs:
            return "already"
        if any(run.state == "running" for run in self.runs.values()):
            return "busy"
        self.requests.append(request)
        self.runs[request.request_id] = RunState("running")
        return "started"

    def state(self, request_id: str) -> RunState:
        return self.runs.get(request_id, RunState("unknown", "never heard of"))

    def end(self, state: str, version: int | None = None) -> None:
        (name,) = [name for name, run in self.runs.items() if run.state == "running"]
        self.runs[name] = RunState(state, "as the test says", version)


def prediction(
    request_id: str,
    rows: int = 8,
    *,
    time: float = START,
    version: int = 1,
    scores=None,
    seed=None,
    features: Features = SHOP.features,
):
    random = np.random.default_rng(zlib.crc32(request_id.encode()) if seed is None else seed)
    dense, categorical = draw_arrays(features, rows, random)
    if scores is None:
        scores = random.random(rows)
    return PredictionBatch(
        request_id=request_id,
        time=time,
        model_version=version,
        dense=dense,
        categorical=categorical,
        scores=np.asarray(scores, np.float32),
    )


def matured(
    request_id: str, time: float, version: int, labels, scores, *, positions=None, users=None
) -> MaturedRequests:
    """Return one request with its final labels."""
    n = len(labels)
    return MaturedRequests(
        ids=np.array([request_id], object),
        times=np.array([time], np.float64),
        versions=np.array([version], np.int32),
        sizes=np.array([n]),
        numbers=np.array([1]),
        scores=np.asarray(scores, np.float32),
        positions=np.full(n, NO_POSITION, np.int32)
        if positions is None
        else np.asarray(positions, np.int32),
        labels=np.asarray(labels, np.uint8),
        click_delays=np.full(n, np.nan, np.float32),
        users=np.full(n, MISSING_CATEGORY) if users is None else np.asarray(users, np.int64),
    )


def add_in_pulls(store: StateStore, records, size: int) -> None:
    """Store the records in batches of `size`."""
    for start in range(0, len(records), size):
        pull = records[start : start + size]
        made = [each for each in pull if isinstance(each, PredictionBatch)]
        outcomes = [each for each in pull if isinstance(each, OutcomeBatch)]
        store.add(Predictions.of(made) if made else None, outcomes, [], now=0.0)


def clicks(batch_id: str, events: list[tuple[str, int, float]], event: str = CLICK) -> OutcomeBatch:
    return OutcomeBatch(
        batch_id=batch_id,
        time=max(time for _, _, time in events),
        event=event,
        request_ids=tuple(request_id for request_id, _, _ in events),
        rows=np.array([row for _, row, _ in events], np.int32),
        times=np.array([time for _, _, time in events], np.float64),
    )


def publish(log: SqliteLog, *records, form: RecordFormat = FORM) -> None:
    log.publish([(record_id(record), form.encode(record)) for record in records])


def read_rows(folder: Path) -> list[dict]:
    """Return all archived or uploaded rows below `folder` as dictionaries."""
    paths = sorted(folder.glob("day=*/*.parquet"))
    # Files are opened one by one, because a dataset would add the partition column.
    return [row for path in paths for row in pq.ParquetFile(path).read().to_pylist()]


def read_events(state: Path) -> list[dict]:
    return [json.loads(line) for line in (state / "events.jsonl").read_text().splitlines()]


def monitor_settings(folder: Path, **changes) -> MonitorSettings:
    """Return settings of a monitor whose state, archive and model registry are in `folder`."""
    values = {
        "log": "sqlite:///unused",
        "state": folder / "state",
        "archive": folder / "archive",
        "store": folder / "store",
        "attribution_window_seconds": WINDOW,
        "upload_wait_seconds": 0.0,
    }
    return make_settings(MonitorSettings, **{**values, **changes})


class Bench:
    """One monitor in a folder whose name contains a space.

    `restart` replaces the monitor by a new monitor, as after a kill.
    """

    def __init__(self, folder: Path, *, recommender: Recommender = SHOP, **changes) -> None:
        self.recommender, self.form = recommender, RecordFormat(recommender.features)
        self.folder, self.clock, self.trigger = folder / "a monitor", Clock(START), FakeTrigger()
        self.folder.mkdir(exist_ok=True)
        self.log = SqliteLog(self.folder / "log.db", lease_seconds=5.0, clock=self.clock)
        self.checkpoint = no_checkpoint
        self.settings = monitor_settings(self.folder, **changes)
        self.monitor: Monitor | None = None
        self.store: StateStore | None = None

    def start(self, recommender: Recommender | None = None) -> Monitor:
        self.kill()
        self.store = StateStore(self.settings.state / "monitor.db")
        self.monitor = Monitor(
            self.settings,
            subscriber=self.log,
            store=self.store,
            trigger=self.trigger,
            recommender=recommender or self.recommender,
            clock=self.clock,
            checkpoint=lambda name: self.checkpoint(name),
        )
        return self.monitor

    def turn(self, number: int, seconds: float) -> None:
        """Run several turns of the monitor, and advance the clock by `seconds` after each turn."""
        for _ in range(number):
            self.monitor.tick()
            self.clock.advance(seconds)

    def tick(self, *records, at: float | None = None) -> None:
        """Publish the records, set the clock to `at`, and run one turn of the monitor."""
        publish(self.log, *records, form=self.form)
        self.clock.now = self.clock.now if at is None else at
        self.monitor.tick()

    def evaluate(self, name: str, **of_traffic) -> None:
        """Publish traffic (see `traffic`), and let the monitor decide."""
        traffic(self, name, **of_traffic)
        self.monitor.tick()

    def kill(self) -> None:
        if self.store is not None:
            self.store.close()
        self.store = self.monitor = None

    def close(self) -> None:
        self.kill()
        self.log.close()

    @property
    def url(self) -> str:
        """URL of the log."""
        return f"sqlite:///{self.folder / 'log.db'}?lease_seconds=5".replace(" ", "%20")

    @property
    def archived(self) -> list[dict]:
        return read_rows(self.settings.archive)

    @property
    def events(self) -> list[dict]:
        return read_events(self.settings.state)

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.events]


DRIFT = {
    "policies": "threshold",
    "auc_threshold": 0.74,
    "min_clicks": 20,
    "consecutive_breaches": 1,
}
DRIFT |= {"window_rows": 1000, "cooldown_seconds": 1000.0}
"""Settings under which one bad window is a confirmed drift."""


def traffic(b: Bench, name: str, *, auc: str, version: int = 1, rows: int = 400) -> None:
    """Publish 20 requests and let their attribution window end.

    If `auc` is `good`, clicks follow the scores. If `auc` is `bad`, clicks are independent of the
    scores.
    """
    scores, time, num_requests = np.linspace(0.0, 1.0, rows), b.clock.now, 20
    is_clicked = np.arange(rows) >= rows // 2 if auc == "good" else np.arange(rows) % 2 == 0
    request_of = np.arange(rows) // 2 % num_requests
    for number in range(num_requests):
        of_request, request = request_of == number, f"{name}-{number}"
        publish(
            b.log,
            prediction(
                request,
                of_request.sum(),
                time=time,
                version=version,
                scores=scores[of_request],
                features=b.recommender.features,
            ),
            form=b.form,
        )
        events = [
            (request, row, time + 1) for row in np.flatnonzero(is_clicked[of_request]).tolist()
        ]
        publish(b.log, clicks(f"o-{request}", events))
    b.clock.now = time + WINDOW


def retrain_request(name: str) -> RetrainRequest:
    return RetrainRequest(
        request_id=name,
        reason="a test",
        requested_at="",
        window_start="",
        window_end="",
        observed={"auc": 0.5},
    )
