"""The whole loop once, on this machine: what `make demo` does, stage by stage.

Lake -> pipeline (first model) -> Triton, monitor, uploader, traffic -> drift -> the monitor finds it and asks for a run
-> incremental model, released under traffic -> AUC recovers -> everything stopped, summary and report written. This
file only sequences; sizes are `demo_plan`'s, processes `stack`'s, numbers `summary`'s.
"""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from components.contracts import promotion_journal
from components.contracts.errors import ContractError, PermanentError, TemporaryError
from pipelines.local.demo_plan import DemoPlan, DemoSettings, plan_for_data, plan_for_world
from pipelines.local.observations import JsonLines, RunWatch
from pipelines.local.report import write_report
from pipelines.local.run import LocalFolders
from pipelines.local.screen import Screen
from pipelines.local.stack import Stack
from pipelines.local.summary import failed_promises, summarize
from pipelines.local.triton import TritonServer

__all__ = ["DemoSettings", "run_demo"]

PIPELINE_STEPS = 6


@dataclass(kw_only=True)
class Demo:
    """One run of the demo: where things are, what runs, what was seen."""

    settings: DemoSettings
    folders: LocalFolders
    screen: Screen
    stack: Stack
    triton: TritonServer
    plan: DemoPlan = field(init=False)
    threshold: float = field(init=False)
    timeline: JsonLines = field(init=False)
    events: JsonLines = field(init=False)
    traffic: JsonLines = field(init=False)
    runs: RunWatch = field(init=False)
    steps_done: int = 0

    def __post_init__(self) -> None:
        """Prepares the readers of what the processes will write."""
        root = self.folders.root
        self.timeline = JsonLines(root / "monitor" / "timeline.jsonl")
        self.events = JsonLines(root / "monitor" / "events.jsonl")
        self.traffic = JsonLines(root / "traffic.jsonl")
        self.runs = RunWatch(self.folders.store)

    @property
    def package(self) -> Path:
        """The compiled pipeline."""
        return self.folders.root / "retraining.yaml"

    @property
    def archive(self) -> Path:
        """Where the monitor archives and the uploader takes from."""
        return self.folders.root / "archive"

    @property
    def log_url(self) -> str:
        """The click log."""
        return f"sqlite:///{self.folders.root / 'click_log.sqlite'}"

    def watch(self) -> None:
        """Says what happened since the last call; raises if Triton is gone."""
        if not self.triton.alive():
            raise PermanentError(
                f"triton ended with code {self.triton.returncode}, see {self.folders.logs / 'triton.log'}"
            )
        self.timeline.update()
        self.traffic.update()
        for event in self.events.update():
            if event["kind"] in SHOWN_EVENTS:
                self.screen.say(f"monitor: {event['text']}", "yellow" if event["kind"] == "decision" else "")
        for _, note in self.runs.update():
            if note.state != "running":
                self.steps_done += 1
                facts = ", ".join(f"{k} {_short(v)}" for k, v in note.facts.items())
                tail = f": {note.reason}" if note.reason else (f" ({facts})" if facts else "")
                self.screen.say(f"  {note.step} {note.state} in {note.seconds:.1f} s{tail}")

    def run_to_end(self, module: str, *words: str) -> dict[str, Any]:
        """Runs one of our commands and returns the JSON of its last line.

        Raises:
            PermanentError: it failed; carries its last line.
        """
        log = self.folders.logs / f"{module.rsplit('.', 1)[-1]}.log"
        command = [sys.executable, "-m", module, *words]
        with open(log, "ab") as output:
            result = subprocess.run(command, stdout=subprocess.PIPE, stderr=output, stdin=subprocess.DEVNULL, text=True)
        if result.returncode:
            lines = log.read_text().strip().splitlines()
            raise PermanentError(f"{module} failed: {lines[-1] if lines else 'no word'} (see {log})")
        answer: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
        return answer

    def monitor_status(self) -> dict[str, Any]:
        """The monitor's own account of itself."""
        port = json.loads((self.folders.root / "monitor" / "http.json").read_text())["port"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=5) as response:
            status: dict[str, Any] = json.load(response)
        return status


SHOWN_EVENTS = ("decision", "requested", "run_started", "run_ended", "version_seen", "breach", "undecided")


def _short(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def run_demo(settings: DemoSettings) -> int:
    """Runs the demo; 0 when every promise held, 1 when one did not, 3 when it broke, 130 on Ctrl-C."""
    folders = LocalFolders(root=settings.folder)
    screen = Screen()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    _start_clean(settings.folder)
    # One thread per library: Triton, traffic, monitor and a training run share the machine.
    variables = {"OMP_NUM_THREADS": str(settings.training_threads)}
    try:
        with screen.running(), Stack(logs=folders.logs, variables=variables) as stack:
            return _turn(settings, folders, screen, stack)
    except KeyboardInterrupt:
        screen.say("stopped; nothing is left running", "red")
        return 130
    except (ContractError, PermanentError, TemporaryError) as error:
        screen.say(f"the demo broke: {error}", "red")
        return 3


def _start_clean(folder: Path) -> None:
    """Removes what an earlier demo wrote; refuses a folder that holds anything else.

    Raises:
        ContractError: the folder exists and is not a demo's.
    """
    marker = folder / ".evergreen-demo"
    if folder.exists() and any(folder.iterdir()) and not marker.exists():
        raise ContractError(f"{folder} is not empty and no demo wrote it, expected a folder of the demo's own")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    marker.touch()


def _turn(settings: DemoSettings, folders: LocalFolders, screen: Screen, stack: Stack) -> int:
    from pipelines.compile import compile_pipeline
    from pipelines.placement import Placement

    triton = TritonServer(
        repository=folders.repository,
        runtime=folders.root / "triton",
        log=folders.logs / "triton.log",
        variables=stack.tag_variables,
    )
    demo = Demo(settings=settings, folders=folders, screen=screen, stack=stack, triton=triton)
    folders.pipeline_arguments()
    with screen.stage("lake", "click logs"):
        _prepare_lake(demo)
    with screen.stage("compile", "compile the pipeline"):
        compile_pipeline(demo.package, Placement())
    with triton:
        with screen.stage("first_run", "first model through the pipeline", PIPELINE_STEPS):
            _first_run(demo)
        with screen.stage("baseline", "live traffic, labels arrive later", demo.plan.window_rows):
            _start_services(demo)
            _wait_for_window(demo, version=1)
        with screen.stage("drift", "the world changes", demo.plan.detection_rows):
            stack.tell("replay", "drift")
            fired = _wait_for_decision(demo)
        if fired:
            with screen.stage("retraining", "retrain on the new logs", PIPELINE_STEPS):
                released = _wait_for_run(demo)
            if released:
                with screen.stage("recovery", "the new version serves", demo.plan.window_rows):
                    _wait_for_window(demo, version=2)
        with screen.stage("drain", "stop and account for every record"):
            traffic = _drain(demo)
    summary = summarize(
        folders=folders,
        plan=demo.plan,
        timeline=demo.timeline.lines,
        events=demo.events.lines,
        traffic=traffic,
        seconds=screen.seconds,
        threshold=demo.threshold,
    )
    (folders.root / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    write_report(folders, summary, timeline=demo.timeline.lines, events=demo.events.lines, traffic=demo.traffic.lines)
    return _say_result(demo, summary)


def _prepare_lake(demo: Demo) -> None:
    settings, root = demo.settings, demo.folders.root
    last_day = (datetime.now(timezone.utc) - timedelta(days=1)).date().isoformat()
    common = ["--lake", str(demo.folders.lake), "--last-day", last_day, "--days", "4"]
    if settings.data is None:
        made = demo.run_to_end(
            "inference_client",
            *("simulate", *common, "--rows", str(settings.rows), "--seed", str(settings.seed)),
            *("--world", str(root / "world.json")),
        )
        demo.run_to_end(
            "inference_client",
            *("drift", "--world", str(root / "world.json"), "--output", str(root / "drifted_world.json")),
            *("--seed", str(settings.seed)),
        )
        demo.plan = plan_for_world(settings)
        demo.screen.say(f"  {made['rows']:,} simulated rows, {made['clicks'] / made['rows']:.1%} clicks")
    else:
        made = demo.run_to_end(
            "components.extraction.ingest",
            *(*common, "--data", str(settings.data), "--max-rows", str(settings.rows)),
            *("--lake-fraction", "0.6", "--replay", str(root / "replay.parquet")),
        )
        demo.plan = plan_for_data(settings, replay_rows=made["replay_rows"], lake_rows=made["lake_rows"])
        demo.screen.say(
            f"  {made['lake_rows']:,} rows to learn from, {made['replay_rows']:,} to replay, "
            f"{made['set_aside']:,} malformed set aside"
        )


def _run_command(demo: Demo) -> list[str]:
    """The command that runs the pipeline here; the monitor adds `--request`."""
    command = [sys.executable, "-m", "pipelines", "run", "--package", str(demo.package)]
    command += ["--folder", str(demo.folders.root)]
    parameters = {"triton_urls": demo.triton.grpc_url, **demo.plan.parameters}
    for name, value in parameters.items():
        command += ["-p", f"{name}={json.dumps(value)}"]
    return command


def _first_run(demo: Demo) -> None:
    first = [*_run_command(demo), "-p", "trigger_id=first", "-p", "trigger_reason=first model"]
    # Nothing is live yet: a model whose gate is undecided for lack of rows still beats none, and the verdict says so.
    first += ["-p", "accept_inconclusive=true"]
    process = demo.stack.start("first_run", first)

    def watch() -> None:
        demo.watch()
        demo.screen.advance(demo.steps_done)

    while process.poll() is None:
        watch()
        time.sleep(0.2)
    watch()
    code = demo.stack.wait_for_exit("first_run", seconds=5)
    live = promotion_journal.current(demo.folders.store)
    if code or live is None:
        log = demo.folders.logs / "first_run.log"
        raise PermanentError(f"the first run ended with code {code}: {log.read_text().strip().splitlines()[-1]}")
    demo.threshold = demo.plan.threshold(demo.folders)
    demo.screen.say(f"  version {live.version} is live: {live.reason}")


def _start_services(demo: Demo) -> None:
    plan, root = demo.plan, demo.folders.root
    (root / "monitor").mkdir()
    demo.archive.mkdir()
    python = [sys.executable, "-m"]
    demo.stack.start(
        "uploader",
        [
            *(*python, "monitoring.uploader", "--archive", str(demo.archive), "--lake", str(demo.folders.lake)),
            *("--interval-seconds", "0.5"),
        ],
    )
    demo.stack.start("monitor", [*python, "monitoring", *_monitor_flags(demo)])
    demo.stack.wait_until(
        (root / "monitor" / "http.json").exists, what="the monitor's start", seconds=60, watch=demo.watch
    )
    source = (
        ["--world", str(root / "world.json"), "--drifted-world", str(root / "drifted_world.json")]
        if demo.settings.data is None
        else ["--data", str(root / "replay.parquet"), "--drift-columns", ",".join(plan.drift_columns)]
    )
    demo.stack.start(
        "replay",
        [
            *(*python, "inference_client", "replay", *source, "--server", demo.triton.grpc_url, "--log", demo.log_url),
            *("--rate", str(plan.rate), "--rows-per-request", str(plan.rows_per_request)),
            *("--label-delay-seconds", str(plan.label_delay_seconds), "--seed", str(demo.settings.seed + 1)),
            *("--stats", str(root / "traffic.jsonl"), "--summary", str(root / "traffic_summary.json")),
        ],
        stdin=True,
    )


def _monitor_flags(demo: Demo) -> list[str]:
    plan, root = demo.plan, demo.folders.root
    flags = {
        "log": demo.log_url,
        "state": root / "monitor",
        "archive": demo.archive,
        "store": demo.folders.store,
        "http-port": 0,
        "window-rows": plan.window_rows,
        "auc-threshold": round(demo.threshold, 4),
        "min-clicks": plan.min_clicks,
        "min-rows-since-breach": plan.min_rows_since_breach,
        "cooldown-seconds": 3600,
        "daily-budget": 2,
        "attribution-window-seconds": plan.attribution_window_seconds,
        "archive-roll-rows": plan.archive_roll_rows,
        "archive-roll-seconds": 10,
        "tick-seconds": 0.5,
        "trigger": "local",
        "run-command": shlex.join(_run_command(demo)),
    }
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def _window(demo: Demo, version: int) -> dict[str, Any] | None:
    """The monitor's newest account of a version's window."""
    return next((line for line in reversed(demo.timeline.lines) if line["version"] == version), None)


def _exhausted(demo: Demo) -> bool:
    """Whether the replayed file has come to its end."""
    return bool(demo.traffic.lines) and bool(demo.traffic.lines[-1].get("exhausted"))


def _wait_for_window(demo: Demo, *, version: int) -> None:
    """Waits until the window holds rows of `version` alone, or there are no more rows."""

    def full() -> bool:
        window = _window(demo, version)
        rows = window["rows"] if window else 0
        auc = window["auc"] if window else None
        demo.screen.advance(rows, f"{rows:,} rows" + (f", auc {auc:.4f}" if auc is not None else ""))
        return rows >= demo.plan.window_rows or (_exhausted(demo) and _settled(demo))

    demo.stack.wait_until(full, what=f"a full window of version {version}", seconds=300, watch=demo.watch)


def _settled(demo: Demo) -> bool:
    status = demo.monitor_status()
    return bool(status["pending_rows"] == 0 and status["log_backlog"] == 0)


def _wait_for_decision(demo: Demo) -> bool:
    """Waits for the monitor's decision; False when the rows ran out before it could be sure."""
    start = demo.timeline.lines[-1]["matured_total"]

    def decided() -> bool:
        last = demo.timeline.lines[-1]
        auc = f", auc {last['auc']:.4f}" if last["auc"] is not None else ""
        demo.screen.advance(last["matured_total"] - start, f"threshold {demo.threshold:.4f}{auc}")
        return _fired(demo) or (_exhausted(demo) and _settled(demo))

    demo.stack.wait_until(decided, what="the monitor's decision", seconds=300, watch=demo.watch)
    if not _fired(demo):
        demo.screen.say("  the rows ran out before the monitor could be sure: it asks for no run", "yellow")
    return _fired(demo)


def _fired(demo: Demo) -> bool:
    return any(event["kind"] == "decision" for event in demo.events.lines)


def _wait_for_run(demo: Demo) -> bool:
    """Waits for the triggered run's end; whether it released a version."""
    already = demo.steps_done

    def ended() -> bool:
        demo.screen.advance(demo.steps_done - already)
        return any(event["kind"] == "run_ended" for event in demo.events.lines)

    demo.stack.wait_until(ended, what="the triggered run's end", seconds=900, watch=demo.watch)
    live = promotion_journal.current(demo.folders.store)
    return live is not None and live.version > 1


def _drain(demo: Demo) -> dict[str, Any]:
    """Stops traffic, waits until every record is accounted for, ends all; returns the traffic's summary."""
    demo.stack.tell("replay", "stop")
    code = demo.stack.wait_for_exit("replay", seconds=60)
    if code:
        raise PermanentError(f"the replay ended with code {code}, see {demo.folders.logs / 'replay.log'}")
    demo.stack.wait_until(lambda: _settled(demo), what="the last labels", seconds=120, watch=demo.watch)
    demo.stack.stop("monitor")
    demo.watch()
    demo.stack.stop("uploader", seconds=60)
    summary: dict[str, Any] = json.loads((demo.folders.root / "traffic_summary.json").read_text())
    return summary


def _say_result(demo: Demo, summary: dict[str, Any]) -> int:
    root = demo.folders.root
    auc = summary["auc"]
    numbers = ", ".join(f"{name} {value:.4f}" for name, value in auc.items() if isinstance(value, float))
    demo.screen.say(f"[bold]auc: {numbers}[/bold]")
    demo.screen.say(f"report:  {root / 'report.html'}")
    demo.screen.say(f"summary: {root / 'summary.json'}")
    failures: Sequence[str] = failed_promises(summary, simulated=demo.settings.data is None)
    for failure in failures:
        demo.screen.say(f"not held: {failure}", "red")
    return 1 if failures else 0
