"""`evergreen reproduce`: trains a stored model again from the lake and its parent, and compares it step by step.

The steps run as their commands, by what the model's manifests and its run's notes say, over a view of the store in the
work folder: files are links there, journals end where the run began, and the recommender is the model's own. The lake
is read as it was then, without files that were written later. The store is only read; nothing is judged or released.

On the same kind of processor, with as many threads, all bytes are the same. Names, times and folders of the run are not
compared, and TFDV's statistics neither: it picks among equally frequent values by chance.
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
from evergreen.registry.models import graph_sha256, judged_model, model_folder, referenced_model
from evergreen.registry.promotion_journal import JOURNAL_FILE, moment_of, read_entries
from evergreen.registry.recommenders import accept
from evergreen.registry.runs import read_notes, trained_model
from evergreen.runtime.durable import sha256_file
from evergreen.runtime.errors import ContractError, PermanentError, Refused
from evergreen.runtime.exit_codes import ExitCode, exits_with_code
from evergreen.runtime.flags import CommandParser, run_flags
from evergreen.serving.graph.export import export
from evergreen.storage.uris import local_path, open_objects, typed_folder, typed_uri
from pipelines.images import ENVIRONMENT_OF_STEP

RUN = "reproduce"
_OF_A_RUN = ("model_id", "created_at", "sha256", "validation_report", "raw_dataset", "training_set")
"""Fields of manifests that are not compared, as URIs are not; what hashes and references are of is compared itself."""
_OF_VALIDATION = ("digest", "num_train_rows", "num_quarantined")
"""Fields of a `RawDataset` that validation changes where rows go into quarantine or come back."""
MAX_SHOWN = 8
"""Differences of a step that are printed."""


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """One model that is to be trained again."""

    store: Path
    model: Model
    raw: RawDataset
    """The rows that it was trained on and judged by."""
    lake: str
    until: str
    """When its run read the lake, ISO 8601: what was written or decided later does not count."""
    facts: Mapping[str, Any]
    """From the notes of its run: the window that was asked for, and the threads of the fit."""
    folder: Path
    """To work in; made anew."""

    def steps(self) -> Iterator[tuple[str, list[str]]]:
        """Runs the steps one by one; yields what each made otherwise than the model's own run did.

        Raises:
            ContractError: what the model was made of is gone, or a step says so.
            Refused, PermanentError: a step ended so; with its reason.
        """
        self._expect_inputs()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._view_store()
        raw, made, stored = self.raw, self.folder / RUN, model_folder(self.store, self.model.model_id)
        parent, champion = raw.parent_model_id or NONE, raw.champion_model_id or NONE
        asked = {name: self.facts.get(name, "") for name in ("window_start", "window_end")}
        rows = self._run("extraction", lake=self.lake, lake_until=self.until, parent=parent, champion=champion, **asked)
        is_screened = local_path(raw.train_uri).parent.name == "validation"
        found = differing(RawDataset.read(rows), raw, but=_OF_VALIDATION if is_screened else ())
        yield "extraction", found + (self._written_since() if found else [])

        valid = self.folder / "valid.json"
        self._run("validation", champion=champion, raw_dataset=rows, valid_dataset=valid)
        found = differing_files(made / "validation", (stored / Model.SCHEMA).parent)
        yield "validation", differing(RawDataset.read(valid), raw) + found

        encoded = self._run("preprocessing", raw_dataset=valid)
        workflow = made / "preprocessing" / Model.WORKFLOW
        yield "preprocessing", differing_files(workflow, stored / Model.WORKFLOW)

        trained = Model.read(self._run("training", backend=self.model.backend, training_set=encoded))
        yield "training", differing(trained, self.model) + differing_weights(trained, self.model, stored)

        released = [line for line in read_entries(self.store) if line.model_id == self.model.model_id]
        if released:
            export(trained, graph := self.folder / "graph")
            yield "graph", differences(graph_sha256(graph), released[0].sha256.get("graph"), "sha256")

    def _expect_inputs(self) -> None:
        for role, model_id in (("model", self.model.model_id), ("parent", self.model.parent_model_id)):
            if model_id and not (model_folder(self.store, model_id) / Model.WEIGHTS).is_dir():
                raise ContractError(
                    f"weights of {role} {model_id} are absent from {self.store}, expected them uncollected"
                )
        if gone := sorted({each["day"] for each in self.model.days} - lake_versions(self.lake).keys()):
            expected = f"expected those that model {self.model.model_id} learned"
            raise ContractError(f"lake {self.lake} holds no rows of {', '.join(gone)}, {expected}")

    def _view_store(self) -> None:
        view, until, hidden = self.folder / "store", moment_of(self.until), shutil.ignore_patterns(".*")
        for name in ("models", "releases", "schemas", "quarantine"):
            if (self.store / name).exists():
                shutil.copytree(self.store / name, view / name, ignore=hidden, copy_function=os.symlink)
        (view / JOURNAL_FILE).symlink_to(self.store / JOURNAL_FILE)
        for journal in view.glob(f"*/{JOURNAL_FILE}"):
            lines = journal.read_text().splitlines(keepends=True)
            journal.unlink()  # the link
            journal.write_text("".join(line for line in lines if moment_of(json.loads(line)["time"]) <= until))
        accept(view, self.model.recommender, who=RUN, why=self.model.model_id, now=datetime.now(timezone.utc))

    def _run(self, step: str, **inputs: object) -> Path:
        """Runs a step; the path of its manifest."""
        python, view, output = python_of(ENVIRONMENT_OF_STEP[step]), self.folder / "store", self.folder / f"{step}.json"
        if not python.exists():
            raise ContractError(f"{step} needs {python}, which is absent; `make environments` builds it")
        threads = {"OMP_NUM_THREADS": str(self.facts["threads"])} if "threads" in self.facts else {}
        flags = run_flags(run=RUN, store=view.as_uri(), work=self.folder.as_uri(), output=output, **inputs)
        command = [str(python), "-m", f"components.{step}", *flags]
        variables = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TF_CPP_MIN_LOG_LEVEL": "3", **threads}
        with open(output.with_suffix(".log"), "wb") as log:
            code = subprocess.run(command, env=variables, stdout=log, stderr=subprocess.STDOUT).returncode
        if code:
            reason = next((note.reason for note in read_notes(view, RUN) if note.step == step), f"see {log.name}")
            kind = {1: Refused, 2: ContractError}.get(code, PermanentError)
            raise kind(f"{step} ended with {code}: {reason}")
        return output

    def _written_since(self) -> list[str]:
        """Names the files of the model's days that were not read."""
        begun, days = moment_of(self.until).timestamp(), {f"day={each['day']}" for each in self.model.days}
        listed = [each.name for each in open_objects(self.lake).list() if each.written_at > begun]
        named = [name for name in listed if name.partition("/")[0] in days]
        return [f"not read, because written after {self.until}: {', '.join(named)}"] if named else []


def differing(found: Manifest, expected: Manifest, *, but: Collection[str] = ()) -> list[str]:
    """The fields in which two manifests differ, without those that name a run, its folders or its time."""
    skipped = {*_OF_A_RUN, *but, *(name for name in asdict(expected) if name.endswith("uri"))}
    ours, theirs = ({n: v for n, v in asdict(each).items() if n not in skipped} for each in (found, expected))
    return differences(ours, theirs)


def differences(found: Any, expected: Any, name: str = "") -> list[str]:
    """Where two values of a manifest differ, one line each; days are compared with the same days.

    >>> differences({"days": [{"day": "2026-03-01", "num_rows": 9}]}, {"days": [{"day": "2026-03-01", "num_rows": 8}]})
    ['days 2026-03-01 num_rows is 9, expected 8']
    """
    ours, theirs = _by_day(found), _by_day(expected)
    if not (isinstance(ours, dict) and isinstance(theirs, dict)):
        return [] if found == expected else [f"{name} is {found}, expected {expected}"]
    keys = sorted(ours.keys() | theirs.keys())
    return [line for key in keys for line in differences(ours.get(key), theirs.get(key), f"{name} {key}".strip())]


def _by_day(value: Any) -> Any:
    is_of_days = isinstance(value, list) and all(isinstance(each, dict) and "day" in each for each in value)
    return {each["day"] + " replayed" * each.get("replay", False): each for each in value} if is_of_days else value


def differing_files(found: Path, expected: Path) -> list[str]:
    """The files of the folder `expected` that have other bytes below `found`, or are not there."""
    names = [path.name for path in expected.iterdir() if path.name != Path(Model.STATISTICS).name]
    ours, theirs = ({n: sha256_file(at / n) for n in names if (at / n).is_file()} for at in (found, expected))
    return differences(ours, theirs)


def differing_weights(found: Model, expected: Model, stored: Path) -> list[str]:
    """How many tensors differ and by how much; where the weights in the folder `stored` were collected, whether."""
    lines = differences(found.sha256[Model.WEIGHTS], expected.sha256[Model.WEIGHTS], Model.WEIGHTS)
    if not lines or not (stored / Model.WEIGHTS).exists() or found.slot_sizes != expected.slot_sizes:
        return lines
    ours = open_model(local_path(found.uri) / Model.WEIGHTS, found.slot_sizes)
    theirs = open_model(stored / Model.WEIGHTS, expected.slot_sizes)
    for part, a, b in zip(("weights", "first moments", "second moments"), ours.parts, theirs.parts):
        pairs = [*zip(a.tables, b.tables), *((a.dense[name], values) for name, values in b.dense.items())]
        apart = [float(np.abs(x - y).max(initial=0.0)) for x, y in pairs]
        lines.append(f"{part}: {sum(each > 0 for each in apart)} of {len(apart)} tensors, by {max(apart):.3g} at most")
    return lines


def find(store: Path, model_id: str, *, work: Path, lake: str | None = None) -> Reproduction:
    """The reproduction of a stored model in a new folder below `work`; without `lake`, from where its run read it.

    Raises:
        ContractError: the model was never judged, or its run left no notes.
    """
    model, _, raw = judged_model(store, model_id)
    runs = [read_notes(store, path.parent.name) for path in (store / "runs").glob("*/training.json")]
    notes = next((run for run in runs if trained_model(run) == model_id), [])
    begun = {note.step: note.started_at for note in notes}
    if "extraction" not in begun:
        raise ContractError(f"the run that trained {model_id} left no notes in {store}, expected what it was asked for")
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
    """The command's flags."""
    parser = CommandParser(prog="evergreen reproduce", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("model", metavar="VERSION|MODEL_ID", help="a released version, or a model that was judged")
    parser.add_argument("--store", required=True, help="model store, folder or its URI; it is only read")
    parser.add_argument("--work", required=True, type=Path, help="folder to work in, below which a new one is made")
    parser.add_argument("--lake", help="folder, its URI, or gs:// (default: where the model's run read it)")
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; `REFUSED` where something differs."""
    arguments = build_parser().parse_args(argv)
    store = typed_folder(arguments.store, "--store")
    model_id = referenced_model(store, arguments.model).model_id
    work = find(store, model_id, lake=arguments.lake, work=arguments.work.resolve())
    first = None
    for step, found in work.steps():
        shown = found[:MAX_SHOWN] + [f"and {len(found) - MAX_SHOWN} more"] * (len(found) > MAX_SHOWN)
        print("\n           ".join([f"{'DIFFERS' if found else 'same':<8} {step}", *shown]), flush=True)
        first = first or (step if found else None)
    print(f"model {model_id}: " + (f"differs first in {first}; see {work.folder}" if first else "the same bytes"))
    return ExitCode.REFUSED if first else ExitCode.DONE


if __name__ == "__main__":
    raise SystemExit(main())
