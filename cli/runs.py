"""`evergreen runs` lists the runs of a model registry: their state, data, model and verdict.

The command reads the steps' files (`evergreen.registry.runs`) and the verdicts
(`evergreen.registry.models`). Until a run ends, it has notes but no outcome.
"""

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from cli.models import DEMO_STORE, registry_folder
from evergreen.contracts.checks import PASS
from evergreen.contracts.manifests import SCRATCH, Model, Verdict
from evergreen.registry.models import stored_model, verdict_paths
from evergreen.registry.runs import (
    RunOutcome,
    StepNote,
    each_note,
    find_outcome,
    first_start,
    kubeflow_name,
    left_anything,
    read_notes,
    trained_model,
)
from evergreen.runtime.errors import FROM_SCRATCH, ContractError, flags_to_run_again
from evergreen.runtime.exit_codes import ExitCode, exits_with_code
from evergreen.runtime.flags import CommandParser, add_store_flag
from evergreen.runtime.kubeflow import EXPERIMENT, KubeflowServer
from evergreen.runtime.plain_text import show
from evergreen.runtime.terminal import TableColumn, add_listing_flags, local_time, print_table

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RunLine:
    """Summary of one run. An undefined number is None."""

    run: str
    """Name of the run's folder in the registry. All commands identify the run by this name."""
    name: str
    """The run's name in Kubeflow, which is not unique. The name of a run on this machine is
    `run`."""
    state: str
    """State from `RunOutcome`, or `running` if the run has no outcome yet."""
    step: str
    """Step that decided the outcome, or the current step of a running run."""
    started_at: str | None
    seconds: float | None
    """Duration of the run in seconds, from the start of its first step."""
    rows: int | None
    """Number of training rows."""
    quarantined_files: int
    """Number of files of the lake that the run left out because their rows cannot be read."""
    model_id: str | None
    version: int | None
    auc: float | None
    """AUC of the candidate on the held-out rows."""
    verdict: str | None
    settings: dict[str, dict[str, object]]
    """For each section, the settings of the model's recommender that differ from the defaults.
    Settings from the run's flags are included."""
    reason: str


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags."""
    runs = CommandParser(
        prog="evergreen runs",
        description="List runs with their result, rows, model, AUC and verdict.",
    )
    add_store_flag(runs, default=DEMO_STORE)
    add_listing_flags(runs)
    runs.add_argument(
        "--newest",
        type=int,
        default=50,
        metavar="N",
        help="list at most the newest N runs; 0 = all",
    )
    runs.add_argument(
        "--host",
        default="",
        help="address of the KFP API; also lists failed runs that wrote nothing to the model "
        "registry",
    )
    runs.add_argument(
        "--namespace", default="", help="with --host: namespace of a multi-user installation"
    )
    runs.add_argument("--token-file", default="", help="with --host: file of the server's token")
    return runs


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    arguments = build_parser().parse_args(argv)
    store = registry_folder(arguments.store)
    if arguments.newest < 0:
        raise ContractError(f"--newest is {arguments.newest}, expected at least 0")
    if arguments.host and arguments.json:
        raise ContractError(
            "--host and --json are given, expected one of them: JSON has only the store's runs"
        )
    print_runs(store, newest=arguments.newest, as_json=arguments.json, wide=arguments.wide)
    if arguments.host:
        server = KubeflowServer(
            arguments.host, namespace=arguments.namespace, token_file=arguments.token_file
        )
        print_lost_runs(store, server, newest=arguments.newest)
    return ExitCode.DONE


def read_runs(store: Path, *, newest: int | None = None) -> list[RunLine]:
    """Return the `newest` runs of the registry, or all of them, oldest first.

    Raises:
        ContractError: a file in the registry is corrupt.
    """
    runs = sorted(
        (_start_of(store, folder.name), folder.name) for folder in (store / "runs").glob("*")
    )
    return [read_run(store, run) for _, run in runs[-newest if newest else None :]]


def _start_of(store: Path, run: str) -> str:
    """Return the start time of the run's first step.

    If the start is unknown, return the end of the run, or "" if the end is unknown too.
    """
    if first := next(each_note(store, run), None):
        return first.started_at
    outcome = find_outcome(store, run)
    return outcome.ended_at if outcome else ""


def read_run(store: Path, run: str) -> RunLine:
    """Read a run's notes and its outcome from the registry.

    Raises:
        ContractError: a file of the run is corrupt.
    """
    notes, outcome = read_notes(store, run), find_outcome(store, run)
    begun, last = first_start(notes), notes[-1] if notes else StepNote(step="none")
    model, verdict = _model_and_verdict(store, notes)
    candidate = verdict.candidate if verdict else None
    facts = {name: value for note in notes for name, value in note.facts.items()}
    return RunLine(
        run=run,
        name=kubeflow_name(run)[0],
        state=outcome.state if outcome else "running",
        step=outcome.step if outcome else last.step,
        started_at=begun.isoformat(timespec="seconds") if begun else None,
        seconds=(datetime.fromisoformat(outcome.ended_at) - begun).total_seconds()
        if outcome and begun
        else None,
        rows=facts.get("train_rows"),
        quarantined_files=facts.get("quarantined_files", 0),
        model_id=model.model_id if model else None,
        version=outcome.version if outcome else None,
        auc=candidate.auc if candidate else None,
        verdict=verdict.decision if verdict else None,
        settings={name: dict(values) for name, values in model.recommender.settings.items()}
        if model
        else {},
        reason=outcome.reason if outcome else last.reason,
    )


def _model_and_verdict(store: Path, notes: list[StepNote]) -> tuple[Model | None, Verdict | None]:
    """Return the model and the verdict of the run.

    The model or the verdict is None if the run ended before it was written.
    """
    name = trained_model(notes)
    if name is None:
        return None, None
    path = verdict_paths(store, name)[0]
    return stored_model(store, name), Verdict.read(path) if path.exists() else None


COLUMNS = (
    TableColumn(name="started", is_wide_only=True),
    TableColumn(name="run", is_cut_in_middle=True),
    TableColumn(name="id"),
    TableColumn(name="state"),
    TableColumn(name="step", is_wide_only=True),
    TableColumn(name="seconds", is_number=True, is_wide_only=True),
    TableColumn(name="rows", is_number=True, is_wide_only=True),
    TableColumn(name="AUC", is_number=True),
    TableColumn(name="verdict", is_wide_only=True),
    TableColumn(name="version", is_number=True),
    TableColumn(name="model", is_flexible=True),
)


def print_runs(
    store: Path, *, newest: int | None = None, as_json: bool = False, wide: bool = False
) -> None:
    """Print a table of the runs, and the reason of each failed run.

    JSON output also contains the settings of each run.
    """
    lines = read_runs(store, newest=newest)
    if as_json:
        print(json.dumps([asdict(line) for line in lines], indent=2))
        return
    if not lines:
        show(f"no run has left anything in {store}")
        return
    columns: tuple[TableColumn, ...] = COLUMNS
    rows = [_cells(line) for line in lines]
    if all(line.name == line.run for line in lines):  # runs on this machine have no separate id
        columns, rows = _without_id(columns), [_without_id(row) for row in rows]
    print_table(columns, rows, wide=wide)
    for line in lines:
        if line.state == "failed":
            show(f"{line.name} failed at {line.step}: {line.reason}")
        if line.quarantined_files:
            show(
                f"{line.name} left out {line.quarantined_files} unreadable files, which its "
                "validation report names"
            )
    if len(lines) == newest:
        print(f"these are the newest {newest} runs, --newest 0 lists all")


def print_lost_runs(store: Path, server: KubeflowServer, *, newest: int | None) -> None:
    """Print runs that failed in Kubeflow and left nothing in the registry.

    These runs do not appear in any other command.

    Args:
        store: Folder of the registry.
        server: Kubeflow's API.
        newest: Number of Kubeflow's newest runs to check. None or 0 selects 100 runs.

    Raises:
        TemporaryError: the server does not respond.
        PermanentError: the server rejected the request.
    """
    experiment = server.find_experiment(EXPERIMENT)
    failed = server.failed_runs(experiment, among=newest or 100) if experiment else []
    for run in failed:
        if not left_anything(store, run.run_id):
            show(
                f"{run.name} failed and wrote nothing to the model registry: {run.text}; see "
                f"{run.link}"
            )


def describe_run(store: Path, outcome: RunOutcome) -> str:
    """Return lines about a run: its reports, its model, and at last how it ended."""
    made = read_run(store, outcome.run)
    lines = [f"report of {step}: {uri}" for step, uri in outcome.reports.items()]
    if made.model_id is not None:
        auc = "unknown" if made.auc is None else f"{made.auc:.4f}"
        lines.append(
            f"model {made.model_id}, auc {auc} on held-out rows, verdict {made.verdict or 'none'}"
        )
    return "\n".join([*lines, f"{outcome.state} at {outcome.step}: {outcome.reason}"])


def what_next(store: Path, outcome: RunOutcome, *, command: Sequence[str]) -> str | None:
    """Return advice for a run that released no model, or None if no action is needed.

    Args:
        store: Folder of the registry.
        outcome: Result of the run.
        command: Words of the command that started the run. The flag `-p NAME=VALUE` has two words,
            other flags have one.
    """
    if outcome.state == "released":
        return None
    if outcome.state == "canary":
        return (
            f"`evergreen release canary status --store {shlex.quote(str(store))}` shows the "
            "progress of the new version"
        )
    verdict = _model_and_verdict(store, read_notes(store, outcome.run))[1]
    if outcome.state == "evaluated" and verdict is not None:
        flag = f"--store {shlex.quote(str(store))}"
        champion, candidate = verdict.champion_model_id, verdict.candidate_model_id
        comparison = f"evergreen audit compare {champion} {candidate} {flag}"
        promotion = f"evergreen release promote {flag} --model-id {candidate} --override WHY"
        doubt = "" if verdict.decision == PASS else f", although its verdict is {verdict.decision}"
        sentences = [f"{comparison} compares it with the live model"] if champion else []
        return "\nnext: ".join([*sentences, f"{promotion} makes the model live{doubt}"])
    ways = verdict.advice if verdict is not None and outcome.state == "refused" else []
    flags = next(filter(None, map(flags_to_run_again, [*ways, outcome.reason])), [])
    sentences = [*ways, *([shlex.join(_with_flags(command, flags))] if flags else [])]
    return (
        "\nnext: ".join(sentences)
        or "correct what the reason names, and run the same command again"
    )


_SETTINGS = "settings="
"""Prefix of the flag that passes the values of `--set` to the pipeline."""


def _with_flags(command: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return the command with these flags, which replace earlier flags of the same names."""
    replaced = {word.partition("=")[0] for word in flags if "=" in word}
    replaced |= {
        "trigger_id",
        *(SCRATCH if FROM_SCRATCH in flags else ()),
    }  # leave out `trigger_id`, because the run that it triggered has ended
    options, words = [], iter(command)
    for word in words:
        given = [word, next(words)] if word in ("-p", "--set") else [word]
        if given[-1].startswith(_SETTINGS):
            changes = shlex.split(given[-1].removeprefix(_SETTINGS))
            left = [each for each in changes if each.partition("=")[0] not in replaced]
            given = [word, _SETTINGS + shlex.join(left)] if left else []
        if given and given[-1].partition("=")[0] not in replaced and given != [FROM_SCRATCH]:
            options += given
    return [
        *options,
        *([FROM_SCRATCH] if FROM_SCRATCH in command and FROM_SCRATCH not in flags else []),
        *flags,
    ]


def _without_id(row: tuple[T, ...]) -> tuple[T, ...]:
    return (*row[:2], *row[3:])


def _cells(line: RunLine) -> tuple[str | None, ...]:
    def shown(value: float | None, form: str) -> str | None:
        return None if value is None else f"{value:{form}}"

    numbers = shown(line.seconds, ".0f"), shown(line.rows, ","), shown(line.auc, ".4f")
    begun = local_time(line.started_at)
    cells = (begun, *kubeflow_name(line.run), line.state, line.step, *numbers)
    return (*cells, line.verdict, shown(line.version, "d"), line.model_id)


if __name__ == "__main__":
    raise SystemExit(main())
