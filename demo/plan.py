"""Choose the demo's sizes, recommender and command lines.

The sizes follow from the number of rows. The command lines pass these sizes as flags to the
packages. `stack` starts and watches the processes, and `demo` orders the events.
"""

import gzip
import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.compute as pc
import pyarrow.parquet as pq

from demo.environments import REPOSITORY
from demo.log_server import LogLocation, sqlite_log
from demo.runner import LocalFolders
from evergreen.config.features import Features
from evergreen.config.reader import nearest
from evergreen.config.spec import Recommender
from evergreen.contracts.criteo import CRITEO
from evergreen.contracts.manifests import Verdict
from evergreen.contracts.raw_rows import LABEL, REQUEST_ID, is_visible
from evergreen.recommender_file.draft import (
    KINDS,
    LEFT_OUT,
    draft,
    guess_roles,
    read_sample,
    recommender_name,
)
from evergreen.recommender_file.form import read_recommender
from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import ContractError

_CRITEO_FILE = REPOSITORY / "examples" / "criteo" / "recommender.yaml"
"""File that describes the simulated rows, and a user's rows in Criteo's format."""
_DRAFTED_FORMS = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".parquet")
"""Endings of the files from which a recommender can be drafted, if the data is a folder."""
_MAX_CHANGED_VALUES, _MIN_ROWS_PER_VALUE = 1000, 20
"""Limits for the category columns that the drift permutes: maximum number of categories, and
minimum rows per category. With these limits, a short window has enough rows to train new weights
for every category."""

SEQUENTIAL, NOTIFY_ONLY = "sequential", "data_drift"
POLICIES = (SEQUENTIAL, NOTIFY_ONLY)
"""Policies of the monitor. The first policy requests runs, and the second policy only notifies
people."""

_BAKE_SECONDS = 2.0
"""Duration of a new version's baking in seconds. The default of an hour would be too long for a
demo."""

_MAX_REQUEST_RATE = 80.0
"""Requests per second that a laptop can send during a training run."""
_MAX_REQUEST_ROWS = 256
"""Maximum number of rows of a request that is replayed unchanged. A request with more rows is sent
in parts."""

_MIN_DATA_ROWS = 1_000
"""Minimum number of rows in a user's data. With fewer rows, the AUC of the held-out tenth is too
uncertain."""


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """Settings that the user chose."""

    folder: Path
    """Folder of the demo. The files of an earlier demo are removed."""
    data: Path | None = None
    """A user's file or folder of rows, or None for simulated clicks."""
    recommender: Path | None = None
    """File that describes the data. If None, Criteo's rows get the Criteo recommender, and other
    rows get a drafted recommender."""
    rows: int = 250_000
    """Number of rows of the simulated lake. If `data` is given, the maximum number of rows to read
    from it."""
    seed: int = 7
    log: str = "sqlite"
    """Kind of the event log, one of `log_server.LOG_KINDS`."""
    drift_columns: tuple[str, ...] = ()
    """Columns of `data` that drift (see `demo.simulation.traffic`). If empty, `columns_to_change`
    chooses the columns."""


@dataclass(frozen=True, kw_only=True)
class DemoPlan:
    """Sizes of one demo."""

    base: Recommender
    """Recommender that the demo extends by its own settings."""
    rate: float
    """Rows per second of traffic."""
    rows_per_request: int
    """Number of rows per request. If `keeps_requests` is True, larger requests are split into parts
    of this number."""
    window_rows: int
    """Capacity of the monitor's window, in rows."""
    min_clicks: int
    """Minimum clicks and minimum non-clicks of a window for a decision."""
    min_rows_since_breach: int
    """Number of rows that must follow the alarm before a run is requested. The next model trains on
    these rows and so adapts to the drift."""
    archive_roll_rows: int
    bake_rows: int
    """Number of rows after which a version counts as good if there is no evidence against it."""
    label_delay_seconds: float = 0.4
    """Mean delay of a label in seconds. The maximum delay is four times the mean."""
    attribution_window_seconds: float = 2.2
    drift_bucket_seconds: float = 2.0
    """Length of a bucket in seconds of event time. The features of each bucket are compared with
    the features of the training rows."""
    drift_grace_seconds: float = 2.0
    """Time in seconds that a bucket waits for late predictions. The client publishes every 0.15
    s."""
    drift_min_rows: int = 2_000
    """Minimum rows of a bucket for a comparison. A smaller bucket is merged with the next
    bucket."""
    drift_columns: tuple[str, ...] = ()
    keeps_requests: bool = False
    """Whether the replay groups the rows by their original requests."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Additional settings of the demo's recommender. Each key is the path of a setting. Settings of
    the base recommender take precedence."""

    def recommender(self) -> Recommender:
        """Return the recommender that the demo accepts into its registry.

        A release requires a pass of the gate, because the demo cannot advance a canary.
        """
        named = self.base.named_settings
        return self.base.with_settings(
            {
                "release.rollout": "full",
                **{path: value for path, value in self.settings.items() if path not in named},
                "release.bake_seconds": _BAKE_SECONDS,
                "release.bake_rows": self.bake_rows,
                "monitor.window_rows": self.window_rows,
                "monitor.min_clicks": self.min_clicks,
                "monitor.min_rows_since_breach": self.min_rows_since_breach,
                "monitor.cooldown_seconds": 3600,
                "monitor.daily_budget": 2,
                "monitor.attribution_window_seconds": self.attribution_window_seconds,
                "monitor.decide_seconds": 0.5,
                "monitor.policies": ",".join(POLICIES),
                "monitor.notify_only": NOTIFY_ONLY,
                "monitor.drift_bucket_seconds": self.drift_bucket_seconds,
                "monitor.drift_grace_seconds": self.drift_grace_seconds,
                "monitor.drift_min_rows": self.drift_min_rows,
            }
        )


def read_verdicts(folders: LocalFolders) -> list[Verdict]:
    """Return the gate's verdicts of all runs, oldest first."""
    found = [Verdict.read(path) for path in folders.artifacts.glob("*/evaluation/verdict")]
    return sorted(
        found, key=lambda each: each.candidate_model_id
    )  # a model id begins with the time of training


def plan_for_simulator(settings: DemoSettings) -> DemoPlan:
    """Return sizes for simulated traffic, which never ends."""
    # With fewer rows, the first model is weaker, and a shorter window is enough to detect its
    # failure.
    window = max(8_000, min(20_000, settings.rows // 20))
    return DemoPlan(
        base=read_recommender(_CRITEO_FILE),
        rate=4000,
        rows_per_request=64,
        window_rows=window,
        min_clicks=500,
        min_rows_since_breach=window * 4 // 5,
        archive_roll_rows=window,
        # In simulations, 300 shuffled streams were evaluated. After 4,000 rows, the bad release was
        # accepted in 0 to 22 % of the streams, and after 10,000 rows in none.
        bake_rows=10_000,
        settings={"gate.min_auc": 0.65, "training.seed": settings.seed},
    )


def plan_for_data(
    settings: DemoSettings,
    base: Recommender,
    *,
    replay_rows: int,
    lake_rows: int,
    clicks: int,
    replay_requests: int,
) -> DemoPlan:
    """Return the demo's sizes for a user's rows.

    The replay lasts at most two minutes for any number of rows.

    Rows are sent in their original requests. Rows without requests are sent as one request each. If
    a laptop cannot send so many requests per second, several requests are sent together.

    The first sixth of the rows fills the window of the baseline. About a quarter of the rows later,
    the monitor decides. Another sixth fills the window of the new version. The remaining rows are
    sent during the training run, which takes about 45 s. If there are few rows, the windows are
    small. Gate and monitor then report that their results are uncertain.

    Args:
        settings: Settings of the user.
        base: The recommender of the rows.
        replay_rows: Number of rows to replay.
        lake_rows: Number of rows in the lake.
        clicks: Number of clicks in all rows.
        replay_requests: Number of requests of the rows to replay.

    Raises:
        ContractError: there are too few rows to train, hold out and replay, all rows have the same
            label, or one of `drift_columns` is not a feature.
    """
    for name in settings.drift_columns:
        if name not in base.features.names:
            raise ContractError(
                f"drift column {name!r} is not a feature{nearest(name, base.features.names)}"
            )
    rows = lake_rows + replay_rows
    if rows < _MIN_DATA_ROWS:
        raise ContractError(
            f"the data has {rows} rows, expected at least {_MIN_DATA_ROWS:,}: three fifths of them "
            "train and evaluate the first model, the others are replayed as traffic"
        )
    if clicks in (0, rows):
        raise ContractError(
            f"the data has {clicks:,} clicks in {rows:,} rows, expected rows of both labels. "
            f"data.label of the recommender names the column of clicks: it is {base.data.label!r}"
        )
    window = max(200, min(20_000, replay_rows // 6))
    rate = min(2000.0, replay_rows / min(110.0, 50 + replay_rows / 200))
    keeps_requests = rate * replay_requests <= _MAX_REQUEST_RATE * replay_rows
    return DemoPlan(
        base=base,
        rate=rate,
        rows_per_request=_MAX_REQUEST_ROWS if keeps_requests else int(max(1, min(64, rate // 8))),
        keeps_requests=keeps_requests,
        window_rows=window,
        min_clicks=max(20, min(500, window // 40)),
        min_rows_since_breach=window,
        archive_roll_rows=max(500, window),
        bake_rows=window // 2,
        drift_min_rows=max(200, min(2_000, window // 4)),
        drift_columns=settings.drift_columns,
        settings={
            "gate.min_auc": 0.55,
            "training.seed": settings.seed,
            "preprocessing.frequency_threshold": 5 if lake_rows > 100_000 else 2,
            "extraction.holdout_fraction": 0.1 if lake_rows > 20_000 else 0.2,
        },
    )


class DescribedData(NamedTuple):
    """The demo's assumptions about a user's rows."""

    recommender: Recommender
    assumed: list[str]
    """Sentences for people about the assumptions."""
    has_times: bool
    """Whether the rows have event times."""


def describe_data(data: Path, draft_to: Path) -> DescribedData:
    """Describe a user's rows for which no recommender is given.

    Rows with Criteo's columns get Criteo's recommender. Text rows in Criteo's format without a
    header also get Criteo's recommender. Otherwise a recommender is drafted from the first file of
    a folder and written to `draft_to`.

    Raises:
        ContractError: no recommender can be drafted from the rows. The error is also raised if no
            column can be the label or a feature.
    """
    criteo = read_recommender(_CRITEO_FILE)
    if any(map(_is_criteos_text, _files(data))):
        return DescribedData(
            criteo, ["the rows are Criteo's: text without a header"], has_times=False
        )
    files = _drafted_files(data)
    if not files:
        raise ContractError(
            f"{data} contains no file of rows, expected a file that ends with "
            f"{', '.join(_DRAFTED_FORMS)}"
        )
    sample = read_sample(files[0])
    names = {column.name for column in sample.columns}
    if {name.lower() for name in criteo.features.names} <= {name.lower() for name in names}:
        has_times = criteo.data.event_time in names
        return DescribedData(criteo, ["the rows have Criteo's columns"], has_times=has_times)
    roles: dict[str, list[str]] = {}
    for column, guess in guess_roles(sample):
        roles.setdefault(guess.role, []).append(
            f"{column.name} ({guess.why})" if guess.role == LEFT_OUT else column.name
        )
    lacking = [] if LABEL in roles else [LABEL]
    if lacking := lacking + ([] if any(kind in roles for kind in KINDS) else ["a feature"]):
        raise ContractError(
            f"{files[0]} has no column that looks like {' or '.join(lacking)}. Draft a recommender "
            f"file by `evergreen init {files[0]}`, correct the roles of its columns, and pass the "
            "file by --recommender"
        )
    write_whole(draft_to, draft(sample, name=recommender_name(data.name.partition(".")[0])))
    roles_text = [f"{role}: {', '.join(names)}" for role, names in roles.items()]
    base = read_recommender(draft_to)
    drafted = (
        f"{draft_to} is drafted from the rows: correct this file, and pass it by --recommender"
    )
    return DescribedData(base, [drafted, *roles_text], has_times=base.data.event_time in names)


def have_times(data: Path, recommender: Recommender) -> bool:
    """Return whether the rows have the column of event times that their recommender names.

    Returns False if the rows cannot be read.
    """
    try:
        files = _drafted_files(data)
        return bool(files) and recommender.data.event_time in {
            each.name for each in read_sample(files[0]).columns
        }
    except ContractError:
        return False  # ingestion raises the same error later


def _files(data: Path) -> list[Path]:
    if not data.is_dir():
        return [data]
    return sorted(path for path in data.iterdir() if path.is_file() and is_visible(path.name))


def _drafted_files(data: Path) -> list[Path]:
    """Return the data files from which a recommender can be drafted.

    If `data` is a single file, the file is returned whatever its name is.
    """
    return (
        [path for path in _files(data) if path.name.endswith(_DRAFTED_FORMS)]
        if data.is_dir()
        else [data]
    )


_CRITEO_LINE = re.compile(
    rb"[01](\t-?\d*){%d}(\t[0-9a-fA-F]{0,8}){%d}" % (len(CRITEO.numeric), len(CRITEO.categorical))
)


def _is_criteos_text(path: Path) -> bool:
    """Return whether the first line of a text file is a row in Criteo's format.

    The file may be compressed by gzip, and has no header.
    """
    try:
        with open(path, "rb") as plain:
            is_zipped = plain.read(2) == b"\x1f\x8b"
        with gzip.open(path) if is_zipped else open(path, "rb") as file:
            return (
                _CRITEO_LINE.fullmatch(file.readline(_MAX_LINE_BYTES).rstrip(b"\r\n")) is not None
            )
    except (OSError, EOFError):
        return False  # the reader of the file raises the same error later


_MAX_LINE_BYTES = 10_000
"""Maximum length in bytes of the first line of a file in Criteo's format. Criteo's lines have about
300 bytes."""


def columns_to_change(replay: Path, features: Features) -> tuple[str, ...]:
    """Return the numeric features and the columns with few categories, or else all features."""
    table = pq.read_table(replay, columns=list(features.categorical))
    most = min(_MAX_CHANGED_VALUES, table.num_rows // _MIN_ROWS_PER_VALUE)
    few = [name for name in features.categorical if pc.count_distinct(table[name]).as_py() <= most]
    return (*features.numeric, *few) or features.names


def count_requests(replay: Path) -> int:
    """Return how many requests the rows of a file belong to."""
    return int(pc.count_distinct(pq.read_table(replay, columns=[REQUEST_ID])[REQUEST_ID]).as_py())


@dataclass(frozen=True, kw_only=True)
class Services:
    """Addresses and command lines of the demo's processes."""

    settings: DemoSettings
    plan: DemoPlan
    folders: LocalFolders
    triton_url: str
    metrics_url: str
    """Address of Triton's metrics as host:port."""
    log: LogLocation | None = None
    """The event log. None means an SQLite file in the demo's folder."""

    @property
    def package(self) -> Path:
        """The compiled pipeline."""
        return self.folders.root / "retraining.yaml"

    @property
    def archive(self) -> Path:
        """Folder into which the monitor archives, and from which the uploader reads."""
        return self.folders.root / "archive"

    @property
    def monitor_state(self) -> Path:
        """Folder of the monitor's state, timeline and events."""
        return self.folders.root / "monitor"

    @property
    def incident(self) -> Path:
        """Folder of the recorded incident, with the monitor's records and decisions."""
        return self.folders.root / "incident"

    @property
    def log_url(self) -> str:
        """URL of the event log."""
        return (self.log or sqlite_log(self.folders.root)).url

    @property
    def log_variables(self) -> dict[str, str]:
        """Environment variables for the users of the event log."""
        return self.log.variables if self.log else {}

    def run_command(self) -> list[str]:
        """Return the command that runs the pipeline here. The monitor appends `--request`."""
        command = [sys.executable, "-m", "cli", "run", "--package", str(self.package)]
        return [*command, "--folder", str(self.folders.root)]

    def first_run_command(self) -> list[str]:
        """Return the command that runs the pipeline for the first model.

        No model is live yet. The command therefore sets `release.rollout=auto`. With this setting,
        the model is released even if it has too few rows for the gate's checks. The gate's verdict
        reports the missing evidence.
        """
        command = [
            *self.run_command(),
            "-p",
            "trigger_id=first",
            "-p",
            "trigger_reason=first model",
        ]
        return [*command, "--set", "release.rollout=auto"]

    def uploader_command(self) -> list[str]:
        """Return the command that moves archived files into the lake."""
        flags = {"archive": self.archive, "lake": self.folders.lake, "interval-seconds": 0.5}
        return _command("monitoring.uploader", flags)

    def monitor_command(self) -> list[str]:
        """Return the command of the monitor.

        The monitor requests a run when the AUC falls below the gate's AUC, and notifies people
        about drifting features.
        """
        plan = self.plan
        flags = {
            "log": self.log_url,
            "state": self.monitor_state,
            "archive": self.archive,
            "store": self.folders.store,
            "http-port": 0,
            "archive-roll-rows": plan.archive_roll_rows,
            "archive-roll-seconds": 10,
            "tick-seconds": 0.5,
            "trigger": "local",
            "run-command": shlex.join(self.run_command()),
        }
        return _command("monitoring", flags)

    def controller_command(self) -> list[str]:
        """Return the command of the controller, which alone changes what is served."""
        flags = {
            **self._target,
            "metrics-urls": self.metrics_url,
            "lake": self.folders.lake,
            "interval-seconds": 0.5,
        }
        return _command("controller", flags)

    def promote_command(self, model_id: str, reason: str) -> list[str]:
        """Return the command that makes a model live by a person's decision."""
        return _command(
            "controller.promote", {**self._target, "model-id": model_id, "override": reason}
        )

    @property
    def _target(self) -> dict[str, object]:
        folders = self.folders
        return {
            "store": folders.store,
            "repository": folders.repository,
            "triton-urls": self.triton_url,
        }

    def verify_command(self, version: int) -> list[str]:
        """Return the command that recomputes a version's logged scores, and prints JSON."""
        flags: dict[str, object] = {"store": self.folders.store, "lake": self.folders.lake}
        return _command("controller.verify", flags, str(version), "--json")

    def incident_command(self) -> list[str]:
        """Return the command that records all decisions of the monitor and their rows."""
        flags: dict[str, object] = {
            "state": self.monitor_state,
            "archive": self.folders.lake,
            "store": self.folders.store,
            "out": self.incident,
        }
        return _command("monitoring.backtest.incident", flags, "record")

    def decide_again_command(self) -> list[str]:
        """Return the command that replays the incident, and prints JSON."""
        return _command("monitoring.backtest.incident", {}, "replay", str(self.incident), "--json")

    def replay_command(self) -> list[str]:
        """Return the command that sends and logs traffic.

        The replay follows commands on its standard input.
        """
        plan, root = self.plan, self.folders.root
        flags: dict[str, object] = (
            {
                "simulator": root / "simulator.json",
                "drifted-simulator": root / "drifted_simulator.json",
            }
            if self.settings.data is None
            else {"data": root / "replay.parquet", "drift-columns": ",".join(plan.drift_columns)}
        )
        words = ["traffic", *(["--keep-requests"] if plan.keeps_requests else [])]
        flags |= {
            "recommender": self.folders.store,
            "server": self.triton_url,
            "log": self.log_url,
            "rate": plan.rate,
            "rows-per-request": plan.rows_per_request,
            "label-delay-seconds": plan.label_delay_seconds,
            "seed": self.settings.seed + 1,
            "stats": root / "traffic.jsonl",
            "summary": root / "traffic_summary.json",
        }
        return _command("demo.simulation", flags, *words)


def _command(module: str, flags: dict[str, object], *words: str) -> list[str]:
    pairs = (word for name, value in flags.items() for word in (f"--{name}", str(value)))
    return [sys.executable, "-m", module, *words, *pairs]
