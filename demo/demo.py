"""Run the complete loop once on this machine, for `make demo`.

The stages in order are the lake, the pipeline for the first model, Triton with monitor, uploader
and traffic, and the drift. The monitor detects the drift and requests a run of the pipeline. An
incremental model is released under traffic, and the AUC recovers. A bad release is rolled back
automatically. Finally all processes stop, every logged score is recomputed, and summary and report
are written. This module calls the stages in order. `plan` defines sizes and command lines, `stack`
runs the processes, and `summary` computes the numbers.
"""

import contextlib
import fcntl
import json
import logging
import math
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from demo.log_server import check_log, sqlite_log, start_log
from demo.plan import (
    DemoPlan,
    DemoSettings,
    DescribedData,
    Services,
    columns_to_change,
    count_requests,
    describe_data,
    have_times,
    plan_for_data,
    plan_for_simulator,
    read_verdicts,
)
from demo.report import write_report
from demo.runner import LocalFolders
from demo.stack import DIRECT, LOOPBACK, JsonLines, ProcessDied, Stack, last_line, printed_json
from demo.summary import (
    LiveChange,
    Observations,
    ReplayedDecisions,
    VerifiedVersion,
    advice_in_demo,
    decision_sentences,
    failed_promises,
    first_model_sentence,
    ingested_sentences,
    retrain_decision,
    serving_sentences,
    summarize,
)
from demo.triton import TritonServer
from evergreen.config.sections import check_settings
from evergreen.config.spec import Recommender
from evergreen.recommender_file.form import read_recommender
from evergreen.registry import promotion_journal
from evergreen.registry.models import read_serving_target, write_serving_target
from evergreen.registry.promotion_journal import baking
from evergreen.registry.recommenders import accept
from evergreen.registry.runs import RunOutcome, StepNote, read_notes, read_outcomes
from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import ContractError, PermanentError
from evergreen.runtime.flags import whoami

_PUBLISH_SECONDS = 2.0
"""Maximum seconds from a line of traffic statistics until the log contains the records of this
line."""
_PREPARE_SECONDS, _PROOF_SECONDS, _PROMOTE_SECONDS, _ROLLBACK_SECONDS = 1800.0, 600.0, 120.0, 120.0
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SHOWN_EVENTS = (
    "breach",
    "recovered",
    "decision",
    "held",
    "busy",
    "unreachable",
    "run_started",
    "run_ended",
    "bad_release",
)
_MARKER = ".evergreen-demo"


class Screen:
    """Progress messages on the terminal, each with the time since the start.

    A terminal also shows the current stage.
    """

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self._started = time.monotonic()
        self._status = self.console.status("")
        self._title = ""
        self.seconds: dict[str, float] = {}
        """Duration of each finished stage in seconds, by name."""

    def print(self, text: str, style: str = "") -> None:
        """Print one line with the time since the start. Brackets in `text` are not markup."""
        elapsed = time.monotonic() - self._started
        # Do not wrap lines. A log file has no line width, and a terminal wraps long lines itself.
        self.console.print(
            f"[dim]{elapsed:6.1f} s[/dim]  {escape(text)}", style=style or None, soft_wrap=True
        )

    @contextmanager
    def stage(self, name: str, title: str) -> Iterator[None]:
        """Run one stage: print its title, and record its duration."""
        self.print(title, "bold")
        self._title, started = title, time.monotonic()
        if self.console.is_terminal:
            self._status.start()
        try:
            yield
        finally:
            self._status.stop()
            self.seconds[name] = round(time.monotonic() - started, 2)

    def show_progress(self, note: str) -> None:
        """Show the progress of the current stage."""
        self._status.update(f"{self._title}: {escape(note)}")


class _RunWatch:
    """Watcher of the steps of all runs in a model registry."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._seen: dict[tuple[str, str], str] = {}

    def update(self) -> list[tuple[str, StepNote]]:
        """Return the run and the note of each step that changed its state since the last call."""
        changed = []
        runs = (
            sorted(p.name for p in (self._store / "runs").glob("*")) if self._store.exists() else []
        )
        for run in runs:
            for note in read_notes(self._store, run):
                if self._seen.get((run, note.step)) != note.state:
                    self._seen[run, note.step] = note.state
                    changed.append((run, note))
        return changed


@dataclass(kw_only=True)
class _Demo:
    """One run of the demo in progress."""

    services: Services
    screen: Screen
    stack: Stack
    triton: TritonServer
    status_page: str | None = None
    """URL of the monitor's page, or None before the monitor has started."""

    def __post_init__(self) -> None:
        self.timeline = JsonLines(self.services.monitor_state / "timeline.jsonl")
        self.events = JsonLines(self.services.monitor_state / "events.jsonl")
        self.decisions = JsonLines(self.services.monitor_state / "decisions.jsonl")
        self.traffic = JsonLines(self.folders.root / "traffic.jsonl")
        self.runs = _RunWatch(self.folders.store)

    @property
    def folders(self) -> LocalFolders:
        """Folders of the demo."""
        return self.services.folders

    @property
    def plan(self) -> DemoPlan:
        """Sizes of the demo."""
        return self.services.plan

    def watch(self) -> None:
        """Print all events since the last call.

        Raises:
            PermanentError: The Triton server has ended.
        """
        if not self.triton.alive():
            log = self.folders.logs / "triton.log"
            raise PermanentError(f"triton ended with code {self.triton.returncode}, see {log}")
        self.timeline.update()
        self.traffic.update()
        for event in self.events.update():
            if event["kind"] in _SHOWN_EVENTS:
                self.screen.print(
                    f"monitor: {event['text']}", "yellow" if event["kind"] == "decision" else ""
                )
        for _, note in self.runs.update():
            if note.state != "running":
                self.screen.print(f"  {describe_step(note)}")

    def newest_window(self, version: int) -> dict[str, Any] | None:
        """Return the monitor's latest metrics of one version, or None."""
        return next(
            (line for line in reversed(self.timeline.lines) if line["version"] == version), None
        )

    def answered_since(self, moment: float, version: int) -> float | None:
        """Return the end of the first second in which only `version` served requests.

        Only seconds of traffic that began after `moment` count. Times are in seconds since the
        epoch. Returns None if there is no such second yet.
        """
        lines = self.traffic.lines
        for before, line in zip(lines, lines[1:]):
            if before["time"] >= moment and list(line["versions"]) == [str(version)]:
                return float(line["time"])
        return None

    def run_has_ended(self) -> bool:
        """Return whether the monitor has seen the end of a run."""
        return any(event["kind"] == "run_ended" for event in self.events.lines)

    def has_decided(self) -> bool:
        """Return whether the monitor has requested a run."""
        return retrain_decision(self.events.lines) is not None

    def rows_ran_out(self) -> bool:
        """Return whether all rows of the replayed file were sent."""
        return bool(self.traffic.lines) and bool(self.traffic.lines[-1]["exhausted"])

    def traffic_has_ended(self) -> bool:
        """Return whether all rows of the replayed file were sent and every label is known."""
        return self.rows_ran_out() and self.settled(
            float(self.traffic.lines[-1]["time"]) + _PUBLISH_SECONDS
        )

    def monitor_status(self) -> dict[str, Any]:
        """Return the monitor's status."""
        with DIRECT.open(f"{self.status_page}status", timeout=10) as response:
            status: dict[str, Any] = json.load(response)
        return status

    def settled(self, last_published: float) -> bool:
        """Return whether the monitor has read all records and no label is open.

        The last record was published before `last_published`, in seconds since the epoch. The log's
        watermark must also reach this time, because Pub/Sub does not report its backlog.
        """
        status = self.monitor_status()
        read_up_to = status["log_read_up_to"]
        is_read = (
            read_up_to is not None and read_up_to >= last_published and not status["log_backlog"]
        )
        return bool(is_read and status["pending_rows"] == 0)


def run_demo(settings: DemoSettings) -> int:
    """Run the demo. Return 0 if every promise was kept, else 1.

    Raises:
        ContractError: the data is absent or unusable, or the folder is not a demo's.
        PermanentError, TemporaryError: a process failed.
    """
    _check_data(settings)
    check_log(settings.log)
    with start_clean(settings.folder):
        return _run_in(settings)


def _run_in(settings: DemoSettings) -> int:
    """Run the demo in its folder, which contains only the marker file."""
    folders = LocalFolders(root=settings.folder)
    folders.locations()
    folders.logs.mkdir()
    logging.basicConfig(
        filename=folders.logs / "demo.log", format="%(asctime)s %(name)s %(message)s", force=True
    )
    screen = Screen()
    for number in _ENDING_SIGNALS:
        signal.signal(number, _interrupt)
    try:
        with Stack(logs=folders.logs, variables={}) as stack:
            return _run_stages(settings, folders, screen=screen, stack=stack)
    except KeyboardInterrupt:
        screen.print("stopped; nothing is left running", "red")
        raise


def _interrupt(number: int, frame: object) -> None:
    """Ignore further signals and raise KeyboardInterrupt.

    A second Ctrl-C must not interrupt the clean-up that the first one started.
    """
    for each in _ENDING_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def _run_stages(
    settings: DemoSettings, folders: LocalFolders, *, screen: Screen, stack: Stack
) -> int:
    with screen.stage("lake", "click logs"):
        plan = _prepare_lake(settings, folders, screen=screen, stack=stack)
    triton = TritonServer(
        repository=folders.repository,
        runtime=folders.root / "triton",
        log=folders.logs / "triton.log",
        variables=stack.tag_variables,
    )
    with triton:
        with screen.stage("log", f"start the record log ({settings.log})"):
            log = start_log(settings.log, folders.root, stack)
        services = Services(
            settings=settings,
            plan=plan,
            folders=folders,
            triton_url=triton.grpc_url,
            metrics_url=triton.metrics_address,
            log=log,
        )
        demo = _Demo(services=services, screen=screen, stack=stack, triton=triton)
        with screen.stage("compile", "accept the recommender, compile the pipeline"):
            _accept(folders, plan.recommender(), why="the demo's sizes")
            _compile_pipeline(services.package)
        stack.start("controller", services.controller_command())
        with screen.stage("first_run", "first model through the pipeline"):
            refused = _first_run(demo)
        if refused is not None:
            return _print_missing_model(demo, refused)
        with screen.stage("baseline", "live traffic, labels arrive later"):
            _start_services(demo)
            _wait_for_window(demo, version=1)
        planted = _complete_loop(demo)
        with screen.stage("drain", "stop and account for every record"):
            traffic = _stop_and_summarize(demo)
        with screen.stage(
            "verify", "recompute every logged score offline, make every decision again"
        ):
            versions = _start_verifying(demo)
            replayed = _replay_decisions(demo)
            verified = _finish_verifying(demo, versions)
    observed = Observations(
        folders=folders,
        plan=plan,
        timeline=demo.timeline.lines,
        events=demo.events.lines,
        decisions=demo.decisions.update(),
        traffic=demo.traffic.lines,
        traffic_summary=traffic,
        stage_seconds=screen.seconds,
        planted=planted,
        verified=verified,
        replayed=replayed,
    )
    return _write_results(observed, screen, simulated=settings.data is None)


def _complete_loop(demo: _Demo) -> list[LiveChange]:
    """Start the drift and go through the rest of the loop as far as the rows allow.

    Each stage is printed only after its event has happened. Returns the bad release and its
    rollback, or an empty list if the demo ended earlier.
    """
    screen = demo.screen
    if not _start_drift(demo):
        return []
    with screen.stage("retraining", "retrain on the new logs"):
        released = _wait_for_run(demo)
    if not released:
        return []
    with screen.stage("recovery", "the new version serves"):
        _wait_for_window(demo, version=2)
    if not _wait_until_baked(demo):
        return []
    with screen.stage("bad_release", "someone promotes the old model past the gate"):
        return _plant_bad_release(demo)


def _check_data(settings: DemoSettings) -> None:
    """Check that the data exists and is not in the folder that the demo empties.

    Raises:
        ContractError: the data is absent or in the demo's folder, or `recommender` is given without
            data.
    """
    data = settings.data
    if data is None:
        if settings.recommender is not None:
            raise ContractError(
                f"--recommender is {settings.recommender} without --data, expected --data with the "
                "file of its rows"
            )
        return
    if not data.exists():
        raise ContractError(f"{data} does not exist, expected a file of rows or a folder of them")
    if data == settings.folder or settings.folder in data.parents:
        raise ContractError(
            f"{data} is in {settings.folder}, which the demo empties, expected another folder"
        )


@contextmanager
def start_clean(folder: Path) -> Iterator[None]:
    """Remove the files of an earlier demo, and lock the folder while the body runs.

    Raises:
        ContractError: the folder holds other files, or a demo runs in it.
    """
    marker = folder / _MARKER
    if folder.exists() and any(folder.iterdir()) and not marker.exists():
        raise ContractError(
            f"{folder} contains files that are not from a demo, expected an empty folder or the "
            "folder of a demo"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with _alone_in(folder):
        marker.touch()
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path != marker:
                path.unlink()
        yield


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ContractError(
                f"another demo is running in {folder}, expected its end or another folder "
                "(--folder)"
            ) from error
        yield
    finally:
        os.close(lock)  # closing releases the lock


def open_demo(folder: Path) -> int:
    """Serve a finished demo until Ctrl-C, with its live version and the monitor's page.

    The monitor starts no runs, because it has no trigger. Commands read the server's address from
    the registry. `addresses.sh` sets variables with all addresses for a shell. Returns 0.

    Raises:
        ContractError: the folder contains no finished demo, or the demo is open already.
        PermanentError, TemporaryError: a process failed.
    """
    folders = LocalFolders(root=folder)
    serving_target = read_serving_target(folders.store)
    if serving_target is None or not (folder / "summary.json").exists():
        raise ContractError(
            f"{folder} contains no finished demo, expected the folder of a finished demo"
        )
    state, log = folder / "monitor", sqlite_log(folder).url
    for number in _ENDING_SIGNALS:
        signal.signal(number, _interrupt)
    triton = TritonServer(
        folders.repository, runtime=folder / "triton", log=folders.logs / "triton.log"
    )
    with (
        contextlib.suppress(KeyboardInterrupt),
        _alone_in(folder),
        triton,
        Stack(logs=folders.logs, variables={}) as stack,
    ):
        address = state / "http.json"
        address.unlink(missing_ok=True)
        flags = [
            "--log",
            log,
            "--state",
            str(state),
            "--archive",
            str(folder / "archive"),
            "--http-port",
            "0",
        ]
        stack.start(
            "monitor", [sys.executable, "-m", "monitoring", *flags, "--store", str(folders.store)]
        )
        stack.wait_until(address.exists, what="the monitor's start", seconds=60)
        serving_target = replace(
            serving_target,
            repository_uri=folders.repository.as_uri(),
            triton_urls=[triton.grpc_url],
        )
        write_serving_target(folders.store, serving_target)
        stack.start(
            "controller",
            [
                *(sys.executable, "-m", "controller", "--store", str(folders.store)),
                *("--metrics-urls", triton.metrics_address, "--lake", str(folders.lake)),
                *("--interval-seconds", "0.5"),
            ],
        )
        page = f"http://{LOOPBACK}:{json.loads(address.read_text())['port']}/"
        named = {
            "SERVER": triton.grpc_url,
            "STATUS_PAGE": page,
            "LOG": log,
            "STATE": state,
            "ARCHIVE": folder / "archive",
        }
        named |= {
            name.upper(): getattr(folders, name) for name in ("store", "repository", "lake", "work")
        }
        exports = "".join(
            f"export {name}={shlex.quote(str(value))}\n" for name, value in named.items()
        )
        write_whole(folder / "addresses.sh", exports)
        print(f"report: {(folder / 'report.html').as_uri()}\nstatus page: {page}")
        print(
            f"in another terminal: source {shlex.quote(str(folder / 'addresses.sh'))}\nCtrl-C ends "
            "it",
            flush=True,
        )
        stack.wait_until(lambda: not triton.alive(), what="the end of the server", seconds=math.inf)
        raise PermanentError(f"triton ended with code {triton.returncode}, see {triton.log_path}")
    return 0


def _prepare_lake(
    settings: DemoSettings, folders: LocalFolders, *, screen: Screen, stack: Stack
) -> DemoPlan:
    """Write the lake and the file to replay, and return a plan for this number of rows."""
    root = folders.root
    last_day = (datetime.now(timezone.utc) - timedelta(days=1)).date().isoformat()
    lake = ["--lake", str(folders.lake), "--last-day", last_day, "--days", "4"]
    if settings.data is None:
        seed, simulator = (
            ["--seed", str(settings.seed)],
            ["--simulator", str(root / "simulator.json")],
        )
        simulate = [
            "demo.simulation",
            "lake",
            *lake,
            *simulator,
            *seed,
            "--rows",
            str(settings.rows),
        ]
        made = _printed(stack, "simulate", simulate)
        drift = [
            "demo.simulation",
            "drift",
            *simulator,
            *seed,
            "--output",
            str(root / "drifted_simulator.json"),
        ]
        _printed(stack, "drift", drift)
        screen.print(
            f"  {made['rows']:,} simulated rows over 4 days, {made['clicks'] / made['rows']:.1%} "
            "clicks"
        )
        return plan_for_simulator(settings)
    described = _describe(settings, settings.data)
    for sentence in described.assumed:
        screen.print(f"  {sentence}")
    base, replay = described.recommender, root / "replay.parquet"
    _accept(folders, base, why="describes the demo's rows")
    lake = lake[:2] if described.has_times else lake
    ingest = ["cli.ingest", *lake, "--data", str(settings.data), "--max-rows", str(settings.rows)]
    ingest += ["--store", str(folders.store), "--lake-fraction", "0.6", "--replay", str(replay)]
    stack.start("ingest", [sys.executable, "-m", *ingest])
    made = printed_json(stack.finish("ingest", seconds=_PREPARE_SECONDS))
    for sentence in ingested_sentences(
        made, replay, max_rows=settings.rows, has_times=described.has_times
    ):
        screen.print(f"  {sentence}")
    rows = {name: made[name] for name in ("replay_rows", "lake_rows", "clicks")}
    plan = plan_for_data(settings, base, **rows, replay_requests=count_requests(replay))
    if not plan.drift_columns:
        plan = replace(plan, drift_columns=columns_to_change(replay, base.features))
    if not plan.keeps_requests:
        screen.print(
            f"  a request has up to {plan.rows_per_request} rows: single rows would be too many "
            "requests per second"
        )
    screen.print(
        f"  drift will change the meaning of the values of {', '.join(plan.drift_columns)}"
    )
    return plan


def _describe(settings: DemoSettings, data: Path) -> DescribedData:
    """Return the recommender of the rows, and the demo's assumptions about them."""
    if settings.recommender is not None:
        base = read_recommender(settings.recommender)
        return DescribedData(base, [], has_times=have_times(data, base))
    return describe_data(data, settings.folder / "recommender.yaml")


def _printed(stack: Stack, name: str, module: list[str]) -> dict[str, Any]:
    """Run a module of ours, and return the JSON of the last line that it prints.

    Args:
        stack: The stack of processes.
        name: Name of the process.
        module: Name of the module, and its flags.
    """
    stack.start(name, [sys.executable, "-m", *module])
    found: dict[str, Any] = json.loads(last_line(stack.finish(name, seconds=_PREPARE_SECONDS)))
    return found


def _accept(folders: LocalFolders, recommender: Recommender, *, why: str) -> None:
    check_settings(recommender)
    accept(folders.store, recommender, who=whoami(), why=why, now=datetime.now(timezone.utc))


def _compile_pipeline(package: Path) -> None:
    from pipelines.package import compile_pipeline
    from pipelines.placement import Placement

    compile_pipeline(package, Placement())


def _first_run(demo: _Demo) -> RunOutcome | None:
    """Train the first model. Return the run's outcome if it released no model, else None."""
    process = demo.stack.start("first_run", demo.services.first_run_command())
    while process.poll() is None:
        demo.watch()
        time.sleep(0.2)
    demo.watch()
    code, outcomes = process.returncode, read_outcomes(demo.folders.store)
    demo.stack.finish("first_run", seconds=5, codes=(code,) if outcomes else (0,))
    if outcomes[-1].state != "released":
        return outcomes[-1]
    demo.screen.print(
        f"  version 1 is live; {first_model_sentence(read_verdicts(demo.folders)[0])}"
    )
    return None


def _start_services(demo: _Demo) -> None:
    services = demo.services
    services.monitor_state.mkdir()
    services.archive.mkdir()
    demo.stack.start("uploader", services.uploader_command())
    demo.stack.start("monitor", services.monitor_command(), variables=services.log_variables)
    port = services.monitor_state / "http.json"
    demo.stack.wait_until(port.exists, what="the monitor's start", seconds=60, watch=demo.watch)
    demo.status_page = f"http://{LOOPBACK}:{json.loads(port.read_text())['port']}/"
    demo.screen.print(f"  status page: {demo.status_page}")
    # Pub/Sub has no watermark until a lease has expired. The replay waits for the watermark,
    # because the next model trains on all rows that are sent before the drift.
    demo.stack.wait_until(
        lambda: demo.monitor_status()["log_read_up_to"] is not None,
        what="the monitor's first look at the log",
        seconds=60,
        watch=demo.watch,
    )
    replay, variables = services.replay_command(), services.log_variables
    demo.stack.start("replay", replay, stdin=True, may_end=True, variables=variables)


def _wait_for_window(demo: _Demo, *, version: int) -> None:
    """Wait until the window of `version` is full, or until all rows were sent."""

    def full() -> bool:
        window = demo.newest_window(version) or {"rows": 0, "auc": None}
        auc = f", auc {window['auc']:.4f}" if window["auc"] is not None else ""
        demo.screen.show_progress(f"{window['rows']:,} of {demo.plan.window_rows:,} rows{auc}")
        is_full = window["rows"] >= demo.plan.window_rows
        # If the monitor requests a run before the drift, go on with that run.
        return is_full or demo.traffic_has_ended() or (version == 1 and demo.has_decided())

    demo.stack.wait_until(
        full, what=f"a full window of version {version}", seconds=600, watch=demo.watch
    )


def _start_drift(demo: _Demo) -> bool:
    """Start the drift, wait for the monitor's decision, and return whether it requested a run.

    Returns False if the rows ran out first. The drift does not start if the monitor has already
    requested a run, or if all rows were sent.
    """
    title = "drift begins"
    if demo.has_decided():
        title = "the monitor requests a run before the drift began"
    elif demo.rows_ran_out() or not _request_drift(demo):
        title = "the rows ran out before the drift began"

    def decided() -> bool:
        auc = demo.timeline.lines[-1]["auc"] if demo.timeline.lines else None
        demo.screen.show_progress("" if auc is None else f"auc {auc:.4f}")
        return demo.has_decided() or demo.traffic_has_ended()

    with demo.screen.stage("drift", title):
        demo.stack.wait_until(decided, what="the monitor's decision", seconds=600, watch=demo.watch)
        if not demo.has_decided():
            demo.screen.print(
                "  the rows ran out before the monitor had enough evidence: it requests no run",
                "yellow",
            )
    return demo.has_decided()


def _request_drift(demo: _Demo) -> bool:
    """Send the command `drift` to the replay. Returns False if the replay process has ended."""
    try:
        demo.stack.send_line("replay", "drift")
    except ProcessDied:
        return False
    return True


def _wait_for_run(demo: _Demo) -> bool:
    """Wait for the end of the triggered run. Return whether the run released a version."""
    demo.stack.wait_until(
        demo.run_has_ended, what="the triggered run's end", seconds=1800, watch=demo.watch
    )
    live = promotion_journal.current(demo.folders.store)
    return live is not None and live.version > 1


def _stop_and_summarize(demo: _Demo) -> dict[str, Any]:
    """Stop traffic and all processes, and return the summary of the traffic.

    The processes stop only after every record is archived or counted.
    """
    with contextlib.suppress(ProcessDied):  # it may have ended already
        demo.stack.send_line("replay", "stop")
    demo.stack.finish("replay", seconds=60)
    ended_at = time.time()
    demo.stack.wait_until(
        lambda: demo.settled(ended_at), what="the last labels", seconds=120, watch=demo.watch
    )
    demo.stack.stop("controller", seconds=60)
    demo.stack.stop("monitor")
    demo.watch()
    demo.stack.stop("uploader", seconds=60)
    demo.triton.ask_to_stop()  # Triton needs seconds to stop
    summary: dict[str, Any] = json.loads((demo.folders.root / "traffic_summary.json").read_text())
    return summary


def _wait_until_baked(demo: _Demo) -> bool:
    """Wait until the new version has baked. Return False if all rows were sent before."""

    def has_ended() -> bool:
        return baking(demo.folders.store) is None or demo.rows_ran_out()

    if not has_ended():
        with demo.screen.stage("baking", "the new version is watched"):
            what = "the end of the new version's baking"
            demo.stack.wait_until(has_ended, what=what, seconds=_ROLLBACK_SECONDS, watch=demo.watch)
    if demo.rows_ran_out():
        demo.screen.print("  the rows ran out before a bad release could be planted", "yellow")
    return not demo.rows_ran_out()


def _plant_bad_release(demo: _Demo) -> list[LiveChange]:
    """Promote the first model, which the drift made bad, and wait for its rollback.

    Returns the promotion and the rollback, or an empty list if the rows ran out before a decision.
    """
    first = promotion_journal.read_journal(demo.folders.store)[0]
    started_at = time.time()
    demo.stack.start(
        "promote", demo.services.promote_command(first.model_id, "the demo plants a bad release")
    )
    demo.stack.finish("promote", seconds=_PROMOTE_SECONDS)
    done_at = time.time()
    demo.screen.print(
        f"  the model of version {first.version} is live after {done_at - started_at:.1f} s"
    )

    def rolled_back() -> promotion_journal.Promotion | None:
        line = promotion_journal.current(demo.folders.store)
        return line if line is not None and line.blocked_model_id == first.model_id else None

    demo.stack.wait_until(
        lambda: rolled_back() is not None or demo.traffic_has_ended(),
        what="the rollback",
        seconds=_ROLLBACK_SECONDS,
        watch=demo.watch,
    )
    if (line := rolled_back()) is None:
        demo.screen.print(
            "  the rows ran out before there was enough evidence against the bad version", "yellow"
        )
        return []
    back_at = promotion_journal.moment_of(line.time).timestamp()
    demo.screen.print(f"  rolled back after {back_at - done_at:.1f} s: {line.reason}")
    version, before = line.previous_version or 0, line.version

    def answered_at() -> float | None:
        return demo.answered_since(back_at, before)

    demo.stack.wait_until(
        lambda: answered_at() is not None or demo.rows_ran_out(),
        what=f"a response from version {before}",
        seconds=_ROLLBACK_SECONDS,
        watch=demo.watch,
    )
    made = LiveChange(
        version=version,
        started_at=started_at,
        seconds=round(done_at - started_at, 3),
        why="the demo plants a bad release",
    )
    rollback = LiveChange(
        version=before,
        started_at=done_at,
        seconds=round(back_at - done_at, 3),
        answered_at=answered_at(),
        why=line.reason,
    )
    return [made, rollback]


def _start_verifying(demo: _Demo) -> list[int]:
    """Start `evergreen audit verify` for each served version, and return the versions."""
    versions = sorted({int(version) for line in demo.traffic.lines for version in line["versions"]})
    for version in versions:
        demo.stack.start(f"verify_{version}", demo.services.verify_command(version))
    return versions


def _finish_verifying(demo: _Demo, versions: list[int]) -> list[VerifiedVersion]:
    """Return the findings of `evergreen audit verify` for these versions."""
    logs = [
        demo.stack.finish(f"verify_{version}", seconds=_PROOF_SECONDS, codes=(0, 1))
        for version in versions
    ]
    return [
        VerifiedVersion(
            version=each["version"],
            same=each["same"],
            num_rows=each["num_rows"],
            num_different=each["num_different"],
            max_abs_diff=each["max_abs_diff"],
            wrong_checks=[check["name"] for check in each["checks"] if check["passed"] is False],
        )
        for each in (json.loads(last_line(log)) for log in logs)
    ]


def _replay_decisions(demo: _Demo) -> ReplayedDecisions | None:
    """Replay an incident over the complete demo, and return its findings.

    Returns None if there was no decision.
    """
    if not (demo.services.monitor_state / "decisions.jsonl").exists():
        return None
    demo.stack.start("incident", demo.services.incident_command())
    demo.stack.finish("incident", seconds=_PROOF_SECONDS)
    demo.stack.start("decide_again", demo.services.decide_again_command())
    found = printed_json(demo.stack.finish("decide_again", seconds=_PROOF_SECONDS, codes=(0, 1)))
    counters = next(
        event["counters"] for event in reversed(demo.events.lines) if event["kind"] == "stopped"
    )
    return ReplayedDecisions(
        points=found["points"],
        equal=found["first_difference"] is None,
        digest=found["digest"],
        late_requests=int(counters.get("passed_over", 0)),
        late_rows=int(counters.get("drift_late_row", 0)),
    )


def _write_results(observed: Observations, screen: Screen, *, simulated: bool) -> int:
    """Write summary and report, print which promises were kept, and return the exit code."""
    root = observed.folders.root
    summary = summarize(observed)
    write_whole(root / "summary.json", json.dumps(asdict(summary), indent=2) + "\n")
    write_report(observed, summary)
    numbers = ", ".join(
        f"{name} {value:.4f}" for name, value in asdict(summary.auc).items() if value is not None
    )
    screen.print(f"auc: {numbers}", "bold")
    training = [run.step_seconds.get("training") for run in summary.runs]
    seconds = ", ".join("none" if each is None else f"{each:.1f} s" for each in training)
    screen.print(f"training of each run: {seconds}")
    for sentence in (*decision_sentences(summary), *serving_sentences(summary)):
        screen.print(sentence)
    for sentence in summary.uncertain:
        screen.print(f"uncertain: {sentence}", "yellow")
    screen.print(
        f"{summary.requests['sent']:,} requests, {summary.requests['failed']} failed; "
        f"{summary.records.published:,} records published, {summary.records.archived:,} archived"
    )
    screen.print(f"report:  {root / 'report.html'}")
    screen.print(f"summary: {root / 'summary.json'}")
    screen.print(f"reopen:  evergreen open {shlex.quote(str(root))}")
    for sentence in summary.warnings:
        screen.print(f"warning: {sentence}", "yellow")
    for sentence in summary.to_complete:
        screen.print(f"to complete the loop: {sentence}", "yellow")
    failures = failed_promises(summary, simulated=simulated)
    for failure in failures:
        screen.print(f"broken promise: {failure}", "red")
    return 1 if failures else 0


def _print_missing_model(demo: _Demo, outcome: RunOutcome) -> int:
    """Print why there is no first model, and what would produce one. Return the exit code."""
    verdicts = read_verdicts(demo.folders)
    demo.screen.print(f"no first model: {outcome.state} at {outcome.step}: {outcome.reason}", "red")
    for sentence in verdicts[-1].warnings if verdicts else ():
        demo.screen.print(f"warning: {sentence}", "yellow")
    for sentence in advice_in_demo(verdicts[-1], demo.folders.root) if verdicts else ():
        demo.screen.print(f"to complete the loop: {sentence}", "yellow")
    return 1


def describe_step(note: StepNote) -> str:
    """Return one line about a finished step, with its duration and its most important facts."""
    facts = note.facts
    known = {
        "extraction": "{train_rows:,} training rows, {holdout_rows:,} held out, {malformed:,} "
        "malformed",
        "validation": "{decision}, {num_warnings} warnings over {num_rows:,} rows",
        "preprocessing": "{ids:,} ids, {new_categories:,} of them new",
        "training": "auc {progressive_auc:.4f} on rows before training on them, "
        "{rows_per_second:,.0f} rows/s",
        "deployment": "version {version} serves, parity {parity_max_abs_diff:.1e} over "
        "{parity_rows:,} rows",
    }
    text = note.reason
    if note.state == "done":
        with contextlib.suppress(KeyError, ValueError, TypeError):  # the step's note lacks a fact
            text = known[note.step].format(**facts)
    return f"{note.step} {note.state} in {note.seconds or 0:.1f} s" + (f": {text}" if text else "")
