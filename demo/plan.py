"""The demo's plan: its sizes, chosen from the rows there are, its recommender, and its processes' command lines.

A command line is a room's own flags, filled from the sizes. Starting and watching the processes is `stack`'s; the
order of events is `demo`'s.
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
from demo.log_server import LogPlace, sqlite_log
from demo.runner import LocalFolders
from evergreen.config.features import Features
from evergreen.config.reader import nearest
from evergreen.config.spec import Recommender
from evergreen.contracts.criteo import CRITEO
from evergreen.contracts.manifests import Verdict
from evergreen.contracts.raw_rows import LABEL, REQUEST_ID, is_visible
from evergreen.recommender_file.draft import KINDS, LEFT_OUT, draft, guess_roles, read_sample, recommender_name
from evergreen.recommender_file.form import read_recommender
from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import ContractError

CRITEO_FILE = REPOSITORY / "examples" / "criteo" / "recommender.yaml"
"""Describes the simulated rows, and a user's own where they are Criteo's."""
DRAFTED_FORMS = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".parquet")
"""Ends of the names of files in a folder that a draft is made from."""
MAX_CHANGED_VALUES, MIN_ROWS_PER_VALUE = 1000, 20
"""A category column of few values, which are there often: what a permutation breaks, a short window can learn again."""

SEQUENTIAL, NOTIFY_ONLY = "sequential", "data_drift"
POLICIES = (SEQUENTIAL, NOTIFY_ONLY)
"""The monitor's: the first asks for a run, the other only tells people."""

BAKE_SECONDS = 2.0
"""A demo has no hour to watch a new version."""

MAX_REQUEST_RATE = 80.0
"""Requests a second that a laptop sends beside a training run."""
MAX_REQUEST_ROWS = 256
"""Most rows of a request that is kept; a larger one is sent in parts."""

MIN_DATA_ROWS = 1_000
"""Fewest rows of a user's own; a held-out tenth of fewer has no AUC worth the name."""


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """What the user chose."""

    folder: Path
    """Where everything is written; an earlier demo's content is removed."""
    data: Path | None = None
    """A user's file of rows or folder of them; None = simulated clicks."""
    recommender: Path | None = None
    """File that describes the data; None = Criteo's where the rows are Criteo's, else drafted from them."""
    rows: int = 250_000
    """Rows of the simulated lake, or most rows read of `data`."""
    seed: int = 7
    log: str = "sqlite"
    """Kind of the record log, see `log_server.LOG_KINDS`."""
    drift_columns: tuple[str, ...] = ()
    """With `data`: columns whose values change (`demo.simulation.traffic`); empty = `columns_to_change`."""


@dataclass(frozen=True, kw_only=True)
class DemoPlan:
    """Sizes of one demo."""

    base: Recommender
    """What the demo's recommender is made of."""
    rate: float
    """Rows per second of traffic."""
    rows_per_request: int
    """Rows of a request; with `keeps_requests` at most."""
    window_rows: int
    """Rows in the monitor's window."""
    min_clicks: int
    """Clicks and non-clicks that a window needs before it is judged."""
    min_rows_since_breach: int
    """Rows after the alarm before a run is asked for: what the next model learns the new world from."""
    archive_roll_rows: int
    bake_rows: int
    """Rows after which a version that nothing speaks against is thought well."""
    label_delay_seconds: float = 0.4
    """Mean; no label takes longer than four times this."""
    attribution_window_seconds: float = 2.2
    drift_bucket_seconds: float = 2.0
    """Event time over which features are compared with the training rows."""
    drift_grace_seconds: float = 2.0
    """How long a bucket waits for predictions that are late; the client publishes every 0.15 s."""
    drift_min_rows: int = 2_000
    """Fewest rows of a bucket that is judged; a smaller one joins the next."""
    drift_columns: tuple[str, ...] = ()
    keeps_requests: bool = False
    """Whether the replayed rows are sent in the requests that they belong to."""
    settings: dict[str, Any] = field(default_factory=dict)
    """By path, what the demo's recommender has beside the monitor's, where its base names no other."""

    def recommender(self) -> Recommender:
        """The description that the demo accepts into its store.

        Releases need a pass, because the demo has nobody who steps a canary.
        """
        named = self.base.named_settings
        return self.base.with_settings(
            {
                "release.rollout": "full",
                **{path: value for path, value in self.settings.items() if path not in named},
                "release.bake_seconds": BAKE_SECONDS,
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
    return sorted(found, key=lambda each: each.candidate_model_id)  # which begins with the time of training


def plan_for_world(settings: DemoSettings) -> DemoPlan:
    """Sizes for simulated traffic, which never runs out."""
    # A model of fewer rows knows less, and a shorter window is enough to see it fail.
    window = max(8_000, min(20_000, settings.rows // 20))
    return DemoPlan(
        base=read_recommender(CRITEO_FILE),
        rate=4000,
        rows_per_request=64,
        window_rows=window,
        min_clicks=500,
        min_rows_since_breach=window * 4 // 5,
        archive_roll_rows=window,
        # After 4,000 rows the bad release was thought well in 0 to 22 % of 300 shuffled streams, after 10,000 in none.
        bake_rows=10_000,
        settings={"gate.min_auc": 0.65, "training.seed": settings.seed},
    )


def plan_for_data(
    settings: DemoSettings, base: Recommender, *, replay_rows: int, lake_rows: int, clicks: int, replay_requests: int
) -> DemoPlan:
    """Sizes for a file's rows: the replay lasts at most two minutes, whatever their number.

    Rows are sent in the requests that they belong to, each as a request of its own where they have none, unless these
    are more a second than a laptop sends; then several requests go together.

    A sixth of the rows fills the baseline's window, a quarter passes until the decision, another sixth fills the new
    version's window; what is left must pass while the run trains, which is 45 s at this rate. Few rows make small
    windows; gate and monitor then say how uncertain they are.

    Raises:
        ContractError: the file holds too few rows to hold some out, learn from others and replay the rest; or rows of
            one label alone; or a column that is to change is no feature.
    """
    for name in settings.drift_columns:
        if name not in base.features.names:
            raise ContractError(f"drift column {name!r} is no feature{nearest(name, base.features.names)}")
    rows = lake_rows + replay_rows
    if rows < MIN_DATA_ROWS:
        raise ContractError(
            f"the data holds {rows} rows, expected at least {MIN_DATA_ROWS:,}: three fifths of them train and judge "
            "the first model, the others are replayed as traffic"
        )
    if clicks in (0, rows):
        raise ContractError(
            f"the data holds {clicks:,} clicks in {rows:,} rows, expected rows of both labels: is {base.data.label!r} "
            "the column of the clicks (data.label of the file that --recommender gives)?"
        )
    window = max(200, min(20_000, replay_rows // 6))
    rate = min(2000.0, replay_rows / min(110.0, 50 + replay_rows / 200))
    keeps_requests = rate * replay_requests <= MAX_REQUEST_RATE * replay_rows
    return DemoPlan(
        base=base,
        rate=rate,
        rows_per_request=MAX_REQUEST_ROWS if keeps_requests else int(max(1, min(64, rate // 8))),
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
    """What a user's rows are taken for."""

    recommender: Recommender
    assumed: list[str]
    """Sentences for people."""
    has_times: bool
    """Whether the rows have event times."""


def describe_data(data: Path, draft_to: Path) -> DescribedData:
    """Describe a user's rows that no file describes.

    Rows with Criteo's columns, or in Criteo's form without a header, are Criteo's. Otherwise the first file of a folder
    stands for all, and the draft is written to `draft_to`.

    Raises:
        ContractError: the rows cannot be drafted from, with the draft's own words; or they have no column that can be
            the label, or none that can be a feature.
    """
    criteo = read_recommender(CRITEO_FILE)
    if any(map(_is_criteos_text, _files(data))):
        return DescribedData(criteo, ["the rows are Criteo's: text without a header"], has_times=False)
    files = _drafted_files(data)
    if not files:
        raise ContractError(f"{data} holds no file of rows, expected one that ends with {', '.join(DRAFTED_FORMS)}")
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
            f"{files[0]} has no column that looks like {' or '.join(lacking)}, expected one of each: describe its "
            f"columns in a file (`evergreen recommender init {files[0]}` drafts it) and give it by --recommender"
        )
    write_whole(draft_to, draft(sample, name=recommender_name(data.name.partition(".")[0])))
    said = [f"{role}: {', '.join(names)}" for role, names in roles.items()]
    base = read_recommender(draft_to)
    drafted = f"{draft_to} is drafted from the rows; correct it, and give it by --recommender"
    return DescribedData(base, [drafted, *said], has_times=base.data.event_time in names)


def have_times(data: Path, recommender: Recommender) -> bool:
    """Return whether rows have the event times that their recommender's file names; False if they cannot be read."""
    try:
        files = _drafted_files(data)
        return bool(files) and recommender.data.event_time in {each.name for each in read_sample(files[0]).columns}
    except ContractError:
        return False  # ingestion says what is wrong


def _files(data: Path) -> list[Path]:
    if not data.is_dir():
        return [data]
    return sorted(path for path in data.iterdir() if path.is_file() and is_visible(path.name))


def _drafted_files(data: Path) -> list[Path]:
    """The files that a draft may be made from; whoever names a single file means it, whatever its name."""
    return [path for path in _files(data) if path.name.endswith(DRAFTED_FORMS)] if data.is_dir() else [data]


_CRITEO_LINE = re.compile(
    rb"[01](\t-?\d*){%d}(\t[0-9a-fA-F]{0,8}){%d}" % (len(CRITEO.numeric), len(CRITEO.categorical))
)


def _is_criteos_text(path: Path) -> bool:
    """Whether the first line of a text file, plain or gzip, is a row as Criteo publishes them, without a header."""
    try:
        with open(path, "rb") as plain:
            is_zipped = plain.read(2) == b"\x1f\x8b"
        with gzip.open(path) if is_zipped else open(path, "rb") as file:
            return _CRITEO_LINE.fullmatch(file.readline(_MAX_LINE_BYTES).rstrip(b"\r\n")) is not None
    except (OSError, EOFError):
        return False  # whoever reads the file says what is wrong with it


_MAX_LINE_BYTES = 10_000
"""Longest first line that is looked at; Criteo's have about 300 bytes."""


def columns_to_change(replay: Path, features: Features) -> tuple[str, ...]:
    """The numeric features and the category columns of few values; all where there are none."""
    table = pq.read_table(replay, columns=list(features.categorical))
    most = min(MAX_CHANGED_VALUES, table.num_rows // MIN_ROWS_PER_VALUE)
    few = [name for name in features.categorical if pc.count_distinct(table[name]).as_py() <= most]
    return (*features.numeric, *few) or features.names


def count_requests(replay: Path) -> int:
    """Return how many requests the rows of a file belong to."""
    return int(pc.count_distinct(pq.read_table(replay, columns=[REQUEST_ID])[REQUEST_ID]).as_py())


@dataclass(frozen=True, kw_only=True)
class Services:
    """Where the demo's processes meet, and how each is called."""

    settings: DemoSettings
    plan: DemoPlan
    folders: LocalFolders
    triton_url: str
    metrics_url: str
    """Triton's counters, host:port."""
    log: LogPlace | None = None
    """The record log; None = a SQLite file in the demo's folder."""

    @property
    def package(self) -> Path:
        """The compiled pipeline."""
        return self.folders.root / "retraining.yaml"

    @property
    def archive(self) -> Path:
        """Where the monitor archives and the uploader takes from."""
        return self.folders.root / "archive"

    @property
    def monitor_state(self) -> Path:
        """The monitor's memory, timeline and events."""
        return self.folders.root / "monitor"

    @property
    def incident(self) -> Path:
        """The monitor's records and decisions, to be replayed anywhere."""
        return self.folders.root / "incident"

    @property
    def log_url(self) -> str:
        """The click log."""
        return (self.log or sqlite_log(self.folders.root)).url

    @property
    def log_variables(self) -> dict[str, str]:
        """What the click log's users need in their environment."""
        return self.log.variables if self.log else {}

    def run_command(self) -> list[str]:
        """Runs the pipeline here; the monitor adds `--request`."""
        command = [sys.executable, "-m", "cli", "run", "--package", str(self.package)]
        return [*command, "--folder", str(self.folders.root), "--triton-urls", self.triton_url]

    def first_run_command(self) -> list[str]:
        """Runs the pipeline for the first model.

        Nothing is live yet: a model whose gate is undecided for lack of rows still beats none, and the verdict says so.
        """
        command = [*self.run_command(), "-p", "trigger_id=first", "-p", "trigger_reason=first model"]
        return [*command, "--set", "release.rollout=auto"]

    def uploader_command(self) -> list[str]:
        """Moves archived files into the lake."""
        flags = {"archive": self.archive, "lake": self.folders.lake, "interval-seconds": 0.5}
        return _command("monitoring.uploader", flags)

    def monitor_command(self) -> list[str]:
        """Watches the log; asks for a run when the AUC falls below the gate's, tells of features that drift."""
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
        """Looks after what is served: heals servers, and takes back a new version that is bad."""
        flags = {**self._site, "metrics-urls": self.metrics_url, "interval-seconds": 0.5}
        return _command("controller", flags)

    def promote_command(self, model_id: str, reason: str) -> list[str]:
        """Makes a model live on a person's word."""
        return _command("controller.promote", {**self._site, "model-id": model_id, "override": reason})

    @property
    def _site(self) -> dict[str, object]:
        folders = self.folders
        return {"store": folders.store, "repository": folders.repository, "triton-urls": self.triton_url}

    def verify_command(self, version: int) -> list[str]:
        """Recomputes what a version answered; its findings as JSON."""
        flags: dict[str, object] = {"store": self.folders.store, "lake": self.folders.lake}
        return _command("controller.verify", flags, str(version), "--json")

    def incident_command(self) -> list[str]:
        """Copy all that the monitor decided, and the lake's rows that it decided over, into a folder."""
        flags: dict[str, object] = {
            "state": self.monitor_state,
            "archive": self.folders.lake,
            "store": self.folders.store,
            "out": self.incident,
        }
        return _command("monitoring.backtest.incident", flags, "record")

    def decide_again_command(self) -> list[str]:
        """Replays that incident; what it found as JSON."""
        return _command("monitoring.backtest.incident", {}, "replay", str(self.incident), "--json")

    def replay_command(self) -> list[str]:
        """Sends traffic and logs it; obeys lines on its standard input."""
        plan, root = self.plan, self.folders.root
        flags: dict[str, object] = (
            {"world": root / "world.json", "drifted-world": root / "drifted_world.json"}
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
