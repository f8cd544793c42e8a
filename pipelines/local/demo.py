"""The whole loop once, on this machine: what `make demo` does, stage by stage.

Lake -> pipeline (first model) -> Triton, monitor, uploader, traffic -> drift -> the monitor finds it and asks for a run
-> incremental model, released under traffic -> AUC recovers -> rolled back and forward again -> everything stopped,
every logged score recomputed, summary and report written. This file only sequences; sizes are `demo_plan`'s, command
lines `services`', processes `stack`'s, numbers `summary`'s.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.runtime.durable import write_whole
from components.runtime.errors import ContractError, PermanentError, TemporaryError
from components.store import promotion_journal
from pipelines.local.decision_numbers import retrain_decision, told_decisions
from pipelines.local.demo_data import check_data, prepare_lake, start_clean
from pipelines.local.demo_plan import DemoPlan, DemoSettings
from pipelines.local.demo_proofs import backtest_policies, replay_decisions, verify_scores
from pipelines.local.demo_rollback import show_rollback
from pipelines.local.log_server import check_log, start_log
from pipelines.local.loopback import DIRECT, LOOPBACK
from pipelines.local.observations import JsonLines, RunWatch, describe, last_word
from pipelines.local.release_numbers import told_release
from pipelines.local.report import write_report
from pipelines.local.request_trace import recorded_trace
from pipelines.local.run import LocalFolders
from pipelines.local.screen import Screen
from pipelines.local.services import Services
from pipelines.local.stack import ProcessDied, Stack
from pipelines.local.summary import failed_promises, remembered, summarize, training_seconds
from pipelines.local.triton import TritonServer

__all__ = ["DemoSettings", "run_demo"]

PIPELINE_STEPS = 6
PUBLISH_SECONDS = 2.0
"""How long after a line of traffic what it counts may still be on its way into the log."""
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SHOWN_EVENTS = ("breach", "recovered", "decision", "held", "busy", "unreachable", "run_started", "run_ended")


@dataclass(kw_only=True)
class Demo:
    """One run of the demo under way."""

    services: Services
    screen: Screen
    stack: Stack
    triton: TritonServer
    threshold: float = field(init=False)
    steps_done: int = 0
    walks: list[dict[str, Any]] = field(default_factory=list)
    """The rollback that was shown, see `demo_rollback`; empty = none."""
    verified: list[dict[str, Any]] = field(default_factory=list)
    """What `evergreen verify` found of each version."""
    replayed: dict[str, Any] | None = None
    """What `evergreen replay` found of all decisions."""
    backtests: list[dict[str, Any]] = field(default_factory=list)
    """What `evergreen backtest` said of single policies."""
    status_page: str | None = None
    """Where the monitor's page is, once it is up."""

    def __post_init__(self) -> None:
        """Prepares the readers of what the processes will write."""
        self.timeline = JsonLines(self.services.monitor_state / "timeline.jsonl")
        self.events = JsonLines(self.services.monitor_state / "events.jsonl")
        self.decisions = JsonLines(self.services.monitor_state / "decisions.jsonl")
        self.traffic = JsonLines(self.folders.root / "traffic.jsonl")
        self.runs = RunWatch(self.folders.store)

    @property
    def folders(self) -> LocalFolders:
        """Where everything lies."""
        return self.services.folders

    @property
    def plan(self) -> DemoPlan:
        """The demo's sizes."""
        return self.services.plan

    def watch(self) -> None:
        """Says what happened since the last call; raises if Triton is gone."""
        if not self.triton.alive():
            log = self.folders.logs / "triton.log"
            raise PermanentError(f"triton ended with code {self.triton.returncode}, see {log}")
        self.timeline.update()
        self.traffic.update()
        for event in self.events.update():
            if event["kind"] in SHOWN_EVENTS:
                self.screen.say(f"monitor: {event['text']}", "yellow" if event["kind"] == "decision" else "")
        for _, note in self.runs.update():
            if note.state != "running":
                self.steps_done += 1
                self.screen.say(f"  {describe(note)}")

    def newest_window(self, version: int) -> dict[str, Any] | None:
        """The monitor's newest account of a version's window."""
        return next((line for line in reversed(self.timeline.lines) if line["version"] == version), None)

    def answered_since(self, moment: float, version: int) -> float | None:
        """The end of the first second of traffic, begun after `moment`, in which `version` alone answered."""
        lines = self.traffic.lines
        for before, line in zip(lines, lines[1:]):
            if before["time"] >= moment and list(line["versions"]) == [str(version)]:
                return float(line["time"])
        return None

    def has_event(self, kind: str) -> bool:
        """Whether the monitor has told of such an event."""
        return any(event["kind"] == kind for event in self.events.lines)

    def has_decided(self) -> bool:
        """Whether the monitor has asked for a run."""
        return retrain_decision(self.events.lines) is not None

    def rows_ran_out(self) -> bool:
        """Whether the replayed file came to its end."""
        return bool(self.traffic.lines) and bool(self.traffic.lines[-1]["exhausted"])

    def traffic_has_ended(self) -> bool:
        """Whether the replayed file came to its end and every label is known."""
        return self.rows_ran_out() and self.settled(float(self.traffic.lines[-1]["time"]) + PUBLISH_SECONDS)

    def monitor_status(self) -> dict[str, Any]:
        """The monitor's account of itself."""
        with DIRECT.open(f"{self.status_page}status", timeout=10) as response:
            status: dict[str, Any] = json.load(response)
        return status

    def settled(self, last_published: float) -> bool:
        """Whether the monitor has read all records, the last of them published by then, and no label is open.

        Pub/Sub cannot tell its backlog; up to when it is read, every log can.
        """
        status = self.monitor_status()
        read_up_to = status["log_read_up_to"]
        is_read = read_up_to is not None and read_up_to >= last_published and not status["log_backlog"]
        return bool(is_read and status["pending_rows"] == 0)


def run_demo(settings: DemoSettings) -> int:
    """Runs the demo; 0 every promise held, 1 one did not, 2 the data is unusable, 3 it broke, 130 Ctrl-C.

    Raises:
        ContractError: the data is not there, or the folder is no demo's own.
    """
    check_data(settings)
    check_log(settings.log)
    start_clean(settings.folder)
    folders = LocalFolders(root=settings.folder)
    folders.pipeline_arguments()
    folders.logs.mkdir()
    logging.basicConfig(filename=folders.logs / "demo.log", format="%(asctime)s %(name)s %(message)s", force=True)
    screen = Screen()
    for number in ENDING_SIGNALS:
        signal.signal(number, _interrupt)
    # Triton, traffic, monitor and a training run share the machine.
    variables = {"OMP_NUM_THREADS": str(settings.training_threads)}
    try:
        with screen.running(), Stack(logs=folders.logs, variables=variables) as stack:
            return _turn(settings, folders, screen, stack)
    except KeyboardInterrupt:
        screen.say("stopped; nothing is left running", "red")
        return 130
    except ContractError as error:
        screen.say(f"error: {error}", "red")
        return 2
    except (PermanentError, TemporaryError) as error:
        screen.say(f"the demo broke: {error}", "red")
        return 3


def _interrupt(number: int, frame: object) -> None:
    """Ends the demo once: a second Ctrl-C must not end the clean-up that the first began."""
    for each in ENDING_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def _turn(settings: DemoSettings, folders: LocalFolders, screen: Screen, stack: Stack) -> int:
    with screen.stage("lake", "click logs"):
        plan = prepare_lake(settings, folders, screen)
    triton = TritonServer(
        repository=folders.repository,
        runtime=folders.root / "triton",
        log=folders.logs / "triton.log",
        variables=stack.tag_variables,
    )
    with triton:
        with screen.stage("log", f"start the record log ({settings.log})"):
            log = start_log(settings.log, folders.root, stack)
        services = Services(settings=settings, plan=plan, folders=folders, triton_url=triton.grpc_url, log=log)
        demo = Demo(services=services, screen=screen, stack=stack, triton=triton)
        with screen.stage("compile", "compile the pipeline"):
            _compile(services.package)
        with screen.stage("first_run", "first model through the pipeline", PIPELINE_STEPS):
            _first_run(demo)
        with screen.stage("baseline", "live traffic, labels arrive later", plan.window_rows):
            _start_services(demo)
            _wait_for_window(demo, version=1)
        with screen.stage("drift", "the world changes", plan.detection_rows):
            fired = _drift(demo)
        if fired:
            with screen.stage("retraining", "retrain on the new logs", PIPELINE_STEPS):
                released = _wait_for_run(demo)
            if released:
                with screen.stage("recovery", "the new version serves", plan.window_rows):
                    _wait_for_window(demo, version=2)
                with screen.stage("rollback", "one command back to the old version, one forward again", 2):
                    demo.walks = show_rollback(demo)
        with screen.stage("drain", "stop and account for every record"):
            traffic = _drain(demo)
        with screen.stage("verify", "recompute every logged score offline, make every decision again"):
            demo.verified = verify_scores(demo)
            demo.replayed = replay_decisions(demo)
            demo.backtests = backtest_policies(demo, traffic["drift_time"])
    return _conclude(demo, traffic)


def _compile(package: Path) -> None:
    from pipelines.compile import compile_pipeline
    from pipelines.placement import Placement

    compile_pipeline(package, Placement())


def _first_run(demo: Demo) -> None:
    process = demo.stack.start("first_run", demo.services.first_run_command())
    while process.poll() is None:
        demo.watch()
        demo.screen.advance(demo.steps_done)
        time.sleep(0.2)
    demo.watch()
    code = demo.stack.wait_for_exit("first_run", seconds=5)
    live = promotion_journal.current(demo.folders.store)
    if code or live is None:
        raise PermanentError(f"the first run ended with code {code}: {last_word(demo.folders.logs / 'first_run.log')}")
    demo.threshold = demo.plan.threshold(demo.folders)
    demo.screen.say(f"  version {live.version} is live; a run is asked for below an auc of {demo.threshold:.4f}")


def _start_services(demo: Demo) -> None:
    services = demo.services
    services.monitor_state.mkdir()
    services.archive.mkdir()
    demo.stack.start("uploader", services.uploader_command())
    demo.stack.start("monitor", services.monitor_command(demo.threshold), variables=services.log_variables)
    port = services.monitor_state / "http.json"
    demo.stack.wait_until(port.exists, what="the monitor's start", seconds=60, watch=demo.watch)
    demo.status_page = f"http://{LOOPBACK}:{json.loads(port.read_text())['port']}/"
    demo.screen.say(f"  status page: {demo.status_page}")
    # Pub/Sub cannot say for a lease what it has given out. Rows sent meanwhile would only put the world before the
    # change into what the next model learns from.
    demo.stack.wait_until(
        lambda: demo.monitor_status()["log_read_up_to"] is not None,
        what="the monitor's first look at the log",
        seconds=60,
        watch=demo.watch,
    )
    replay, variables = services.replay_command(), services.log_variables
    demo.stack.start("replay", replay, stdin=True, may_end=True, variables=variables)


def _wait_for_window(demo: Demo, *, version: int) -> None:
    """Waits until the window of `version` is full, or there are no more rows."""

    def full() -> bool:
        window = demo.newest_window(version) or {"rows": 0, "auc": None}
        auc = f", auc {window['auc']:.4f}" if window["auc"] is not None else ""
        demo.screen.advance(window["rows"], f"{window['rows']:,} rows{auc}")
        return window["rows"] >= demo.plan.window_rows or demo.traffic_has_ended()

    demo.stack.wait_until(full, what=f"a full window of version {version}", seconds=600, watch=demo.watch)


def _drift(demo: Demo) -> bool:
    """Changes the world and waits for the monitor's decision; False when the rows ran out before it could be sure."""
    if not demo.rows_ran_out():
        demo.stack.tell("replay", "drift")
    start = demo.timeline.lines[-1]["matured_total"] if demo.timeline.lines else 0

    def decided() -> bool:
        nothing: dict[str, Any] = {"matured_total": 0, "auc": None}
        last = demo.timeline.lines[-1] if demo.timeline.lines else nothing
        auc = f", auc {last['auc']:.4f}" if last["auc"] is not None else ""
        demo.screen.advance(last["matured_total"] - start, f"threshold {demo.threshold:.4f}{auc}")
        return demo.has_decided() or demo.traffic_has_ended()

    demo.stack.wait_until(decided, what="the monitor's decision", seconds=600, watch=demo.watch)
    if not demo.has_decided():
        demo.screen.say("  the rows ran out before the monitor could be sure: it asks for no run", "yellow")
    return demo.has_decided()


def _wait_for_run(demo: Demo) -> bool:
    """Waits for the triggered run's end; whether it released a version."""
    already = demo.steps_done

    def ended() -> bool:
        demo.screen.advance(demo.steps_done - already)
        return demo.has_event("run_ended")

    demo.stack.wait_until(ended, what="the triggered run's end", seconds=1800, watch=demo.watch)
    live = promotion_journal.current(demo.folders.store)
    return live is not None and live.version > 1


def _drain(demo: Demo) -> dict[str, Any]:
    """Stops traffic, waits until every record is accounted for, ends all; returns the traffic's summary."""
    with contextlib.suppress(ProcessDied):  # its rows ran out; its exit code tells
        demo.stack.tell("replay", "stop")
    code = demo.stack.wait_for_exit("replay", seconds=60)
    if code:
        raise PermanentError(f"the replay ended with code {code}, see {demo.folders.logs / 'replay.log'}")
    ended_at = time.time()
    demo.stack.wait_until(lambda: demo.settled(ended_at), what="the last labels", seconds=120, watch=demo.watch)
    demo.stack.stop("monitor")
    demo.watch()
    demo.stack.stop("uploader", seconds=60)
    summary: dict[str, Any] = json.loads((demo.folders.root / "traffic_summary.json").read_text())
    return summary


def _conclude(demo: Demo, traffic: dict[str, Any]) -> int:
    """Writes summary and report, says what held; the exit code."""
    root, timeline, events = demo.folders.root, demo.timeline.lines, demo.events.lines
    summary = summarize(
        folders=demo.folders,
        plan=demo.plan,
        timeline=timeline,
        events=events,
        traffic=traffic,
        seconds=demo.screen.seconds,
        threshold=demo.threshold,
        seconds_of_traffic=demo.traffic.lines,
        walks=demo.walks,
        verified=demo.verified,
        decisions=demo.decisions.update(),
        replayed=demo.replayed,
        backtests=demo.backtests,
        status_page=demo.status_page,
    )
    write_whole(root / "summary.json", json.dumps(summary, indent=2) + "\n")
    write_report(demo.folders, summary, timeline=timeline, events=events, traffic=demo.traffic.lines)
    write_whole(root / "requests.csv", recorded_trace(demo.traffic.lines).as_csv())
    numbers = ", ".join(f"{name} {value:.4f}" for name, value in summary["auc"].items() if value is not None)
    demo.screen.say(f"auc: {numbers}", "bold")
    for sentence in remembered(summary):
        demo.screen.say(sentence)
    told = ", ".join("none" if seconds is None else f"{seconds:.1f} s" for seconds in training_seconds(summary))
    demo.screen.say(f"training, run by run: {told}")
    for sentence in (*told_decisions(summary), *told_release(summary)):
        demo.screen.say(sentence)
    for sentence in summary["uncertain"]:
        demo.screen.say(f"uncertain: {sentence}", "yellow")
    records, requests = summary["records"], summary["requests"]
    demo.screen.say(
        f"{requests['sent']:,} requests, {requests['failed']} failed; "
        f"{records['published']:,} records published, {records['archived']:,} archived"
    )
    demo.screen.say(f"report:  {root / 'report.html'}")
    demo.screen.say(f"summary: {root / 'summary.json'}")
    demo.screen.say(f"traffic: {root / 'requests.csv'} (evergreen scale simulate --trace)")
    failures = failed_promises(summary, simulated=demo.services.settings.data is None)
    for failure in failures:
        demo.screen.say(f"not held: {failure}", "red")
    return 1 if failures else 0
