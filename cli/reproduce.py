"""`evergreen audit reproduce` trains a stored model again, and compares each step.

The steps run as commands. The inputs of the steps come from the model's manifests and from the
notes of its run. The steps read a partial copy of the model registry in the work folder. In this
copy, files are symbolic links, and journals end at the start of the original run. The copy has the
recommender of the stored model. Files that were written to the lake after the original run are
skipped. The command only reads the registry, and neither evaluates nor releases a model.

On the same kind of processor, with the same number of threads, all bytes are equal. Names, times
and folders of the run are not compared. TFDV's statistics are not compared either, because TFDV
chooses at random among equally frequent values.
"""

import argparse
import json
import os
import shutil
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from components.extraction.lineage import lake_versions
from demo.environments import REPOSITORY, python_of
from evergreen.contracts.manifests import NONE, Manifest, Model, RawDataset
from evergreen.networks.files import open_model
from evergreen.registry.models import evaluated_model, graph_sha256, model_folder, referenced_model
from evergreen.registry.promotion_journal import JOURNAL_FILE, moment_of, read_entries
from evergreen.registry.recommenders import accept
from evergreen.registry.runs import read_notes, trained_model
from evergreen.runtime.durable import sha256_file
from evergreen.runtime.errors import ContractError, PermanentError, Refused
from evergreen.runtime.exit_codes import ExitCode, exits_with_code
from evergreen.runtime.flags import CommandParser, add_store_flag, run_flags
from evergreen.runtime.terminal import progress
from evergreen.serving.graph.export import export
from evergreen.storage.uris import local_path, open_objects, typed_folder, typed_uri
from pipelines.images import ENVIRONMENT_OF_STEP

RUN = "reproduce"
_OF_A_RUN = ("model_id", "created_at", "sha256", "validation_report", "raw_dataset", "training_set")
"""Fields of manifests that are not compared. URIs are not compared either. Hashes and references
are skipped, because the files behind them are compared."""
_OF_VALIDATION = ("digest", "num_train_rows", "num_quarantined")
"""Fields of `RawDataset` that validation changes when it quarantines rows."""
MAX_SHOWN = 8
"""Number of differences of a step that are printed."""


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """One model to train again."""

    store: Path
    model: Model
    raw: RawDataset
    """The rows on which the model was trained and evaluated."""
    lake: str
    until: str
    """Time in ISO 8601 when the original run read the lake. Files and decisions of a later time are
    ignored."""
    facts: Mapping[str, Any]
    """Facts from the notes of the original run: the requested window, and the number of threads in
    training."""
    folder: Path
    """Work folder, which is replaced if it exists."""

    def steps(self) -> Iterator[tuple[str, list[str]]]:
        """Run the steps one by one, and yield the name and the differences of each.

        Raises:
            ContractError: inputs of the model no longer exist, or a step raised this error.
            Refused, PermanentError: a step raised this error. The message states the reason.
        """
        self._expect_inputs()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._view_store()
        raw, made, stored = (
            self.raw,
            self.folder / RUN,
            model_folder(self.store, self.model.model_id),
        )
        parent, champion = raw.parent_model_id or NONE, raw.champion_model_id or NONE
        window = {name: self.facts.get(name, "") for name in ("window_start", "window_end")}
        rows = self._run(
            "extraction",
            lake=self.lake,
            lake_until=self.until,
            parent=parent,
            champion=champion,
            **window,
        )
        is_screened = local_path(raw.train_uri).parent.name == "validation"
        found = differing(RawDataset.read(rows), raw, but=_OF_VALIDATION if is_screened else ())
        yield "extraction", found + (self._files_after_run() if found else [])

        valid = self.folder / "valid.json"
        self._run("validation", champion=champion, raw_dataset=rows, valid_dataset=valid)
        found = differing_files(made / "validation", (stored / Model.SCHEMA).parent)
        yield "validation", differing(RawDataset.read(valid), raw) + found

        encoded = self._run("preprocessing", raw_dataset=valid)
        workflow = made / "preprocessing" / Model.WORKFLOW
        yield "preprocessing", differing_files(workflow, stored / Model.WORKFLOW)

        trained = Model.read(
            self._run("training", backend=self.model.backend, training_set=encoded)
        )
        yield (
            "training",
            differing(trained, self.model) + differing_weights(trained, self.model, stored),
        )

        released = [
            line for line in read_entries(self.store) if line.model_id == self.model.model_id
        ]
        if released:
            export(trained, graph := self.folder / "graph")
            yield (
                "graph",
                differences(graph_sha256(graph), released[0].sha256.get("graph"), "sha256"),
            )

    def _expect_inputs(self) -> None:
        for role, model_id in (
            ("model", self.model.model_id),
            ("parent", self.model.parent_model_id),
        ):
            if model_id and not (model_folder(self.store, model_id) / Model.WEIGHTS).is_dir():
                raise ContractError(
                    f"weights of {role} {model_id} are absent from {self.store}, probably removed "
                    "by garbage collection"
                )
        if gone := sorted(
            {each["day"] for each in self.model.days} - lake_versions(self.lake).keys()
        ):
            expected = f"expected the training days of model {self.model.model_id}"
            raise ContractError(
                f"lake {self.lake} contains no rows of {', '.join(gone)}, {expected}"
            )

    def _view_store(self) -> None:
        view, until, hidden = (
            self.folder / "store",
            moment_of(self.until),
            shutil.ignore_patterns(".*"),
        )
        for name in ("models", "releases", "schemas", "quarantine"):
            if (self.store / name).exists():
                shutil.copytree(
                    self.store / name, view / name, ignore=hidden, copy_function=os.symlink
                )
        (view / JOURNAL_FILE).symlink_to(self.store / JOURNAL_FILE)
        for journal in view.glob(f"*/{JOURNAL_FILE}"):
            lines = journal.read_text().splitlines(keepends=True)
            journal.unlink()  # removes only the link
            journal.write_text(
                "".join(line for line in lines if moment_of(json.loads(line)["time"]) <= until)
            )
        accept(
            view,
            self.model.recommender,
            who=RUN,
            why=self.model.model_id,
            now=datetime.now(timezone.utc),
        )

    def _run(self, step: str, **inputs: object) -> Path:
        """Run one pipeline step, and return the path of the manifest that it wrote."""
        python, view, output = (
            python_of(ENVIRONMENT_OF_STEP[step]),
            self.folder / "store",
            self.folder / f"{step}.json",
        )
        if not python.exists():
            raise ContractError(
                f"{step} needs {python}, which is absent; `make environments` builds it"
            )
        threads = {"OMP_NUM_THREADS": str(self.facts["threads"])} if "threads" in self.facts else {}
        flags = run_flags(
            run=RUN, store=view.as_uri(), work=self.folder.as_uri(), output=output, **inputs
        )
        command = [str(python), "-m", f"components.{step}", *flags]
        variables = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            **threads,
        }
        with open(output.with_suffix(".log"), "wb") as log:
            code = subprocess.run(
                command, env=variables, stdout=log, stderr=subprocess.STDOUT
            ).returncode
        if code:
            reason = next(
                (note.reason for note in read_notes(view, RUN) if note.step == step),
                f"see {log.name}",
            )
            kind = {1: Refused, 2: ContractError}.get(code, PermanentError)
            raise kind(f"{step} ended with {code}: {reason}")
        return output

    def _files_after_run(self) -> list[str]:
        """Return a line that names the skipped files, which were written after the model's run."""
        begun, days = (
            moment_of(self.until).timestamp(),
            {f"day={each['day']}" for each in self.model.days},
        )
        listed = [each.name for each in open_objects(self.lake).list() if each.written_at > begun]
        named = [name for name in listed if name.partition("/")[0] in days]
        return [f"skipped, because written after {self.until}: {', '.join(named)}"] if named else []


def differing(found: Manifest, expected: Manifest, *, but: Collection[str] = ()) -> list[str]:
    """Return the differing fields of two manifests.

    Names, folders and times of a run are skipped. Fields named in `but` are also skipped.
    """
    skipped = {*_OF_A_RUN, *but, *(name for name in asdict(expected) if name.endswith("uri"))}
    ours, theirs = (
        {n: v for n, v in asdict(each).items() if n not in skipped} for each in (found, expected)
    )
    return differences(ours, theirs)


def differences(found: Any, expected: Any, name: str = "") -> list[str]:
    """Return the differences between two values of a manifest field, one line each.

    Entries of one day are compared with the other manifest's entries of the same day.

    >>> found, expected = ({"day": "2026-03-01", "num_rows": rows} for rows in (9, 8))
    >>> differences({"days": [found]}, {"days": [expected]})
    ['days 2026-03-01 num_rows is 9, expected 8']
    """
    ours, theirs = _by_day(found), _by_day(expected)
    if not (isinstance(ours, dict) and isinstance(theirs, dict)):
        return [] if found == expected else [f"{name} is {found}, expected {expected}"]
    keys = sorted(ours.keys() | theirs.keys())
    return [
        line
        for key in keys
        for line in differences(ours.get(key), theirs.get(key), f"{name} {key}".strip())
    ]


def _by_day(value: Any) -> Any:
    is_of_days = isinstance(value, list) and all(
        isinstance(each, dict) and "day" in each for each in value
    )
    return (
        {each["day"] + " replayed" * each.get("replay", False): each for each in value}
        if is_of_days
        else value
    )


def differing_files(found: Path, expected: Path) -> list[str]:
    """Return the files of folder `expected` that are missing in folder `found` or differ there."""
    names = [path.name for path in expected.iterdir() if path.name != Path(Model.STATISTICS).name]
    ours, theirs = (
        {n: sha256_file(at / n) for n in names if (at / n).is_file()} for at in (found, expected)
    )
    return differences(ours, theirs)


def differing_weights(found: Model, expected: Model, stored: Path) -> list[str]:
    """Return how many tensors differ, and by how much.

    If garbage collection removed the weights from the folder `stored`, only hashes are compared.
    """
    lines = differences(found.sha256[Model.WEIGHTS], expected.sha256[Model.WEIGHTS], Model.WEIGHTS)
    if (
        not lines
        or not (stored / Model.WEIGHTS).exists()
        or found.slot_sizes != expected.slot_sizes
    ):
        return lines
    ours = open_model(local_path(found.uri) / Model.WEIGHTS, found.slot_sizes)
    theirs = open_model(stored / Model.WEIGHTS, expected.slot_sizes)
    for part, a, b in zip(("weights", "first moments", "second moments"), ours.parts, theirs.parts):
        pairs = [
            *zip(a.tables, b.tables),
            *((a.dense[name], values) for name, values in b.dense.items()),
        ]
        apart = [float(np.abs(x - y).max(initial=0.0)) for x, y in pairs]
        lines.append(
            f"{part}: {sum(each > 0 for each in apart)} of {len(apart)} tensors, by "
            f"{max(apart):.3g} at most"
        )
    return lines


def find(store: Path, model_id: str, *, work: Path, lake: str | None = None) -> Reproduction:
    """Find a stored model and the inputs that are needed to train it again.

    Args:
        store: Folder of the registry.
        model_id: The model to train again.
        work: Folder in which the reproduction gets a new folder.
        lake: The lake to read, or None for the lake of the original run.

    Raises:
        ContractError: the model was never evaluated, or its run left no notes.
    """
    model, _, raw = evaluated_model(store, model_id)
    runs = [
        read_notes(store, path.parent.name) for path in (store / "runs").glob("*/training.json")
    ]
    notes = next((run for run in runs if trained_model(run) == model_id), [])
    begun = {note.step: note.started_at for note in notes}
    if "extraction" not in begun:
        raise ContractError(
            f"the run that trained {model_id} left no notes in {store}, expected notes with its "
            "parameters"
        )
    return Reproduction(
        store=store,
        model=model,
        raw=raw,
        lake=typed_uri(lake or raw.source_uri),
        until=begun["extraction"],
        facts={name: value for note in notes for name, value in note.facts.items()},
        folder=work / f"{RUN}-{model_id}",
    )


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags."""
    parser = CommandParser(
        prog="evergreen audit reproduce", description=(__doc__ or "").partition("\n\n")[2]
    )
    parser.add_argument(
        "model",
        metavar="VERSION|MODEL_ID",
        help="a released version, or a model that the gate evaluated",
    )
    add_store_flag(parser)
    parser.add_argument(
        "--work", required=True, type=Path, help="folder in which a new work folder is created"
    )
    parser.add_argument(
        "--lake", help="folder, its URI, or gs:// (default: where the model's run read it)"
    )
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return `REFUSED` if the result of a step differs."""
    arguments = build_parser().parse_args(argv)
    store = typed_folder(arguments.store, "--store")
    model_id = referenced_model(store, arguments.model).model_id
    work = find(store, model_id, lake=arguments.lake, work=arguments.work.resolve())
    first = None
    with progress("training again, steps") as advance:
        for step, found in work.steps():
            advance()
            shown = found[:MAX_SHOWN]
            if len(found) > MAX_SHOWN:
                shown.append(f"and {len(found) - MAX_SHOWN} more")
            print(
                "\n           ".join([f"{'DIFFERS' if found else 'same':<8} {step}", *shown]),
                flush=True,
            )
            first = first or (step if found else None)
    print(
        f"model {model_id}: "
        + (f"first difference in {first}, see {work.folder}" if first else "the same bytes")
    )
    return ExitCode.REFUSED if first else ExitCode.DONE


if __name__ == "__main__":
    raise SystemExit(main())
