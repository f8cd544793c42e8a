"""`evergreen status` shows one installation on one screen.

The screen shows the live version, its AUC with the limit, drift, the last run, the time of the next
possible run, and tasks for a person. The command requests the status from a running monitor. If no
monitor runs, the command reads the files of the state folder. The command therefore also works on
the folder of a finished demo.
"""

import argparse
import json
import shlex
import shutil
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from cli.models import registry_folder
from cli.runs import RunLine, read_runs
from evergreen.contracts.manifests import Verdict
from evergreen.registry.forgotten import removed_at
from evergreen.registry.models import verdict_paths
from evergreen.registry.promotion_journal import (
    ROLLBACK,
    Promotion,
    canary_at_work,
    current,
    interrupted,
)
from evergreen.registry.runs import SEARCH_RUN
from evergreen.runtime.errors import ContractError, TemporaryError
from evergreen.runtime.exit_codes import ExitCode, exits_with_code
from evergreen.runtime.flags import CommandParser
from evergreen.runtime.plain_text import printable
from evergreen.runtime.terminal import local_time
from evergreen.storage.uris import typed_folder
from monitoring.policies.policy import Action
from monitoring.retraining.retraining import IDLE
from monitoring.web.exposition import Snapshot
from monitoring.web.stored import fetch_snapshot, find_address, read_snapshot

LABEL_WIDTH = 10
LITTLE_SPACE = 0.1
"""Minimum free share of a disk. Below this share, the status recommends to free space."""


@dataclass(frozen=True, kw_only=True)
class LiveModel:
    """Version that serves production traffic."""

    version: int
    model_id: str
    previous_version: int | None
    """Version that was live before the action. After a rollback, this field names the version that
    was rolled back."""
    since: str
    action: str
    who: str | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class Canary:
    """The version that serves a share of the traffic."""

    version: int
    share: float | None


@dataclass(frozen=True, kw_only=True)
class Auc:
    """AUC of a version with its 95 % interval. An undefined number is None."""

    version: int
    auc: float | None
    low: float | None
    high: float | None
    limit: float | None
    """AUC below which the version counts as drifted. None if no policy has an AUC limit."""
    rows: int
    is_of_production: bool
    """Whether the AUC was measured on matured rows of production. If False, the AUC was measured on
    the gate's held-out rows."""


@dataclass(frozen=True, kw_only=True)
class DriftStatus:
    """Newest decision of the monitor, and the drifted columns of the newest closed bucket."""

    action: str | None
    reason: str | None
    decided_at: str | None
    drifted_columns: list[str] | None
    """None until the monitor has evaluated the first bucket."""
    num_columns: int | None
    since: str | None
    """Time at which the open incident started."""


@dataclass(frozen=True, kw_only=True)
class NextRun:
    """Next run that the monitor can request, with its earliest time and its budget."""

    in_progress: str | None
    """Name of the retrain request in progress, or None."""
    not_before: str | None
    """Earliest time of the next request, or None if there is no pause."""
    cause: str | None
    budget_left: int | None
    daily_budget: int | None


@dataclass(frozen=True, kw_only=True)
class Status:
    """Content of the status screen. Times are ISO 8601 UTC."""

    time: str
    store: str
    state: str | None
    monitor: str
    """`running`, `stopped`, or `unknown` if no state folder is named."""
    as_of: str | None
    """Time at which the monitor published these numbers."""
    live: LiveModel | None
    canary: Canary | None
    auc: Auc | None
    drift: DriftStatus | None
    last_run: RunLine | None
    next_run: NextRun | None
    needs_person: list[str]


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags."""
    parser = CommandParser(
        prog="evergreen status", description=(__doc__ or "").partition("\n\n")[2]
    )
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=Path("build/demo"),
        help="folder of a demo, with the folders store and monitor",
    )
    parser.add_argument("--store", help="folder or URI of the registry (default: store in FOLDER)")
    parser.add_argument(
        "--state", help="the monitor's state folder (default: monitor in FOLDER, if it exists)"
    )
    parser.add_argument(
        "--monitor", help="address of a running monitor, such as http://localhost:9464"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    arguments = build_parser().parse_args(argv)
    store = registry_folder(arguments.store or _within(arguments.folder, "store"))
    beside = arguments.folder / "monitor"
    state = typed_folder(arguments.state, "--state") if arguments.state else None
    if state is None and arguments.store is None and beside.is_dir():
        state = beside
    status = read_status(store, state, address=arguments.monitor, now=time.time())
    print(json.dumps(asdict(status), indent=2) if arguments.json else format_status(status))
    return ExitCode.DONE


def _within(folder: Path, name: str) -> str:
    if not (folder / name).is_dir():
        raise ContractError(
            f"{folder} has no folder {name}, expected a demo's folder, or --store and --state"
        )
    return str(folder / name)


def read_status(store: Path, state: Path | None, *, address: str | None, now: float) -> Status:
    """Read the status of an installation.

    Args:
        store: Folder of the registry.
        state: State folder of the monitor, or None.
        address: Address of a running monitor. None = read the address from the state folder.
        now: Seconds since the epoch.

    Raises:
        ContractError: a file is corrupt.
        TemporaryError: no monitor responds at `address`.
    """
    snapshot, problem, monitor = _find_snapshot(state, address, now)
    live, runs = current(store), read_runs(store, newest=1)
    return Status(
        time=str(_iso(now)),
        store=str(store),
        state=str(state) if state else None,
        monitor=monitor,
        as_of=_iso(snapshot.time) if snapshot and snapshot.time is not None else None,
        live=_live_model(live) if live else None,
        canary=_canary(canary_at_work(store)),
        auc=_auc(store, live, snapshot),
        drift=_drift(snapshot) if snapshot else None,
        last_run=runs[-1] if runs else None,
        next_run=_next_run(snapshot) if snapshot else None,
        needs_person=list(_needs(store, live, runs, snapshot=snapshot, problem=problem)),
    )


def _find_snapshot(
    state: Path | None, address: str | None, now: float
) -> tuple[Snapshot | None, str | None, str]:
    """Return the monitor's snapshot, its problem, and whether the monitor runs."""
    if address:
        return (*fetch_snapshot(address), "running")
    if state is None:
        return None, None, "unknown"
    if found := find_address(state):
        try:
            return (*fetch_snapshot(found), "running")
        except (TemporaryError, ContractError):
            pass  # another program may use the port of the ended monitor
    stopped = (
        f"no monitor runs on {state}: start it with `evergreen monitor run`, or a demo again with "
        f"`evergreen open {shlex.quote(str(state.parent))}`"
    )
    return read_snapshot(state, now=now), stopped, "stopped"


def _live_model(live: Promotion) -> LiveModel:
    known = {
        name: getattr(live, name)
        for name in ("version", "model_id", "previous_version", "action", "who", "reason")
    }
    return LiveModel(since=live.time, **known)


def _canary(line: Promotion | None) -> Canary | None:
    return Canary(version=line.version, share=line.share) if line else None


def _auc(store: Path, live: Promotion | None, snapshot: Snapshot | None) -> Auc | None:
    """Return the AUC in production.

    Until a row of the live version has matured, the gate's AUC is returned instead.
    """
    for kpis in snapshot.windows if snapshot and live else ():
        if kpis.version == live.version:  # type: ignore[union-attr]
            return Auc(
                version=kpis.version,
                auc=kpis.auc,
                low=kpis.auc_low,
                high=kpis.auc_high,
                limit=snapshot.threshold,  # type: ignore[union-attr]
                rows=kpis.rows,
                is_of_production=True,
            )
    path = verdict_paths(store, live.model_id)[0] if live else None
    if live is None or path is None or not path.exists():
        return None
    verdict = Verdict.read(path)
    quality = verdict.candidate
    return Auc(
        version=live.version,
        auc=quality.auc,
        low=quality.auc_low,
        high=quality.auc_high,
        limit=snapshot.threshold if snapshot else None,
        rows=verdict.num_rows,
        is_of_production=False,
    )


def _drift(snapshot: Snapshot) -> DriftStatus:
    bucket = snapshot.drift
    decision = snapshot.decision.partition(": ") if snapshot.decision else ("", "", "")
    actions = snapshot.actions
    return DriftStatus(
        action=decision[0] or None,
        reason=decision[2] or None,
        decided_at=_iso(snapshot.decided_at),
        drifted_columns=[row["feature"] for row in bucket["columns"] if row["drifted"]]
        if bucket
        else None,
        num_columns=len(bucket["columns"]) if bucket else None,
        since=_iso(actions.incident_since) if actions else None,
    )


def _next_run(snapshot: Snapshot) -> NextRun | None:
    actions = snapshot.actions
    if actions is None:
        return None
    return NextRun(
        in_progress=None if actions.phase == IDLE else actions.request_id,
        not_before=_iso(actions.blocked_until),
        cause=actions.blocked_by,
        budget_left=actions.budget_left,
        daily_budget=actions.daily_budget,
    )


def _needs(
    store: Path,
    live: Promotion | None,
    runs: Sequence[RunLine],
    *,
    snapshot: Snapshot | None,
    problem: str | None,
) -> Iterator[str]:
    """Yield one sentence for each task that needs a person."""
    flag = f"--store {shlex.quote(str(store))}"
    if live is None:
        yield "no version is live: release a first model, `evergreen run --help`"
    if live and live.action == ROLLBACK and live.blocked_model_id:
        yield (
            f"version {live.previous_version} was rolled back automatically at "
            f"{local_time(live.time)} ({live.reason}): `evergreen models show "
            f"{live.previous_version} {flag}` prints its card, and the next release clears this"
        )
    if line := interrupted(store):
        yield (
            f"a deployment of version {line.version} began at {local_time(line.time)} and has no "
            f"end: `evergreen release rollback {flag} --reason WHY` withdraws it"
        )
    if live and (removed := removed_at(store, live.model_id)):
        yield (
            f"version {live.version} still contains a user whose rows were removed at "
            f"{local_time(removed)}: `evergreen run --from-scratch`"
        )
    # A search goes on after a failed trial, and lists it.
    if runs and runs[-1].state == "failed" and not runs[-1].run.startswith(SEARCH_RUN):
        yield f"run {runs[-1].name} failed at {runs[-1].step}: {runs[-1].reason}"
    if problem:
        yield problem
    if snapshot is None:
        return
    if any(each.action is Action.ROLLBACK for each in snapshot.decisions):
        yield (
            f"version {snapshot.serving_version} is bad and is not rolled back: {snapshot.decision}"
        )
    if letters := int(snapshot.counters.get("dead_letter", 0)):
        yield f"{letters} dead letters: `evergreen monitor log dead-letters list URL`"
    if rows := int(snapshot.set_apart_rows):
        yield f"{rows} rows could not be archived and stay in the state folder"
    if (found := snapshot.store_status) and found.store_problem:
        yield f"the monitor cannot read the model registry: {found.store_problem}"
    for name, disk in found.disks.items() if found else ():
        if disk.free < LITTLE_SPACE * disk.size:
            gib = disk.free / 2**30
            yield f"the disk of {name} has {gib:.1f} GiB left: `evergreen admin collect`"


def format_status(status: Status) -> str:
    """Return the status as lines that fit the terminal."""
    lines = [f"{status.store} at {local_time(status.time)}"]
    for label, text in _facts(status):
        lines += _wrapped(text, first=label.ljust(LABEL_WIDTH))
    lines += ["", "Needs a person:" + ("" if status.needs_person else " nothing")]
    for need in status.needs_person:
        lines += _wrapped(need, first="- ")
    return "\n".join(lines)


def _wrapped(text: str, *, first: str) -> list[str]:
    return textwrap.wrap(
        printable(text),
        width=shutil.get_terminal_size().columns,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_on_hyphens=False,
    )


def _facts(status: Status) -> Iterator[tuple[str, str]]:
    live, canary, run = status.live, status.canary, status.last_run
    yield (
        "live",
        f"version {live.version} since {local_time(live.since)} "
        f"({_action_text(live)} by {live.who or 'unknown'})"
        if live
        else "no version",
    )
    if canary:
        share = "shadow traffic" if not canary.share else f"{100 * canary.share:g} % of the traffic"
        yield "canary", f"version {canary.version}, {share}"
    yield "AUC", _auc_text(status.auc)
    yield "drift", _drift_text(status.drift)
    yield (
        "last run",
        f"{run.name}: {run.state} at {run.step}, started {local_time(run.started_at) or 'never'}"
        + (f"; {run.reason}" if run.state not in ("released", "failed") else "")
        if run
        else "none",
    )
    yield "next run", _next_text(status.next_run)
    since = f", its numbers are of {local_time(status.as_of)}" if status.as_of else ""
    yield "monitor", f"{status.monitor}{since}"


def _action_text(live: LiveModel) -> str:
    if live.action != ROLLBACK or live.previous_version is None:
        return live.action
    return f"{live.action} from version {live.previous_version}"


_DRIFT_WORDS = {
    Action.OK: "none",
    Action.UNDECIDABLE: "undecidable",
    Action.BREACH: "suspected",
    Action.HELD: "confirmed, and a run must wait",
    Action.RETRAIN: "confirmed",
    Action.ROLLBACK: "the new version is bad",
}


def _auc_text(auc: Auc | None) -> str:
    if auc is None or auc.auc is None:
        return "undefined: no row with a final label, and no verdict"
    interval = "" if auc.low is None else f" [{auc.low:.4f}, {auc.high:.4f}]"
    limit = "no limit" if auc.limit is None else f"limit {auc.limit:.4f}"
    kind = "matured rows" if auc.is_of_production else "held-out rows of the gate"
    return f"{auc.auc:.4f}{interval}, {limit}, on {auc.rows:,} {kind} of version {auc.version}"


def _drift_text(drift: DriftStatus | None) -> str:
    if drift is None:
        return "unknown: no state folder of a monitor is named"
    if drift.action is None:
        return "nothing was decided yet"
    since = f" since {local_time(drift.since)}" if drift.since else ""
    return f"{_DRIFT_WORDS[Action(drift.action)]}{since}: {drift.reason}"


def _next_text(run: NextRun | None) -> str:
    if run is None:
        return "when a person starts it"
    budget = f"{run.budget_left} of {run.daily_budget} requests of 24 hours are left"
    if run.in_progress:
        return f"{run.in_progress} is in progress; {budget}"
    if run.not_before:
        return f"not before {local_time(run.not_before)}: {run.cause}; {budget}"
    return f"as soon as a drift is confirmed; {budget}" if run.budget_left else f"later: {budget}"


def _iso(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")


if __name__ == "__main__":
    raise SystemExit(main())
