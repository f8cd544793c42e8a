"""Tests of `evergreen audit reproduce`: it reports equal bytes, or the first step that differs."""

import os
import shutil
from dataclasses import replace
from datetime import date
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cli.reproduce import RUN, Reproduction, find, main
from demo.simulation.simulator import Simulator, write_lake
from evergreen.contracts.manifests import Model, RawDataset
from evergreen.networks.files import add_to_bias
from evergreen.runtime.durable import sha256_tree
from evergreen.storage.uris import local_path

pytestmark = pytest.mark.timeout(300)

STEPS = ["extraction", "validation", "preprocessing", "training", "graph"]
EDITED = Path("lake", "day=2026-01-04", "part-00000.parquet")


@pytest.fixture
def copy(chain, tmp_path):
    """A copy of the chain, which a test may change."""
    return chain.copied_to(tmp_path / "a copy")


@pytest.fixture
def second(copy, tmp_path):
    """The reproduction of the second round's model."""
    return find(copy.root / "store", copy.rounds[1].training.model_id, work=tmp_path)


def state(folder):
    return {path: (path.lstat().st_mtime_ns, path.lstat().st_size) for path in folder.rglob("*")}


def test_round_is_trained_again_to_same_bytes_and_registry_does_not_change(chain, tmp_path, capsys):
    store, model = chain.root / "store", chain.rounds[1].training
    before = state(store)
    assert main(["2", "--store", str(store), "--work", str(tmp_path)]) == 0
    output = capsys.readouterr().out.splitlines()
    assert output == [
        *(f"same     {step}" for step in STEPS),
        f"model {model.model_id}: the same bytes",
    ]
    manifests = (tmp_path / f"{RUN}-{model.model_id}" / "store" / "models").glob("*/model.json")
    (made,) = (path.parent for path in manifests if not path.is_symlink())
    assert sha256_tree(made / "weights") == sha256_tree(local_path(model.uri) / "weights")
    assert state(store) == before


def test_rows_that_reach_lake_after_run_are_not_read(copy, second):
    write_lake(
        Simulator.create(seed=9),
        str(copy.root / "aside"),
        rows=500,
        days=3,
        last_day=date(2026, 1, 6),
        seed=9,
    )
    for path in (copy.root / "aside").rglob("*.parquet"):
        (copy.root / "lake" / path.parent.name).mkdir(exist_ok=True)
        path.rename(copy.root / "lake" / path.parent.name / "later.parquet")
    assert next(second.steps()) == ("extraction", [])


@pytest.mark.parametrize("keeps_time", [True, False])
def test_edited_file_of_lake_is_reported_as_first_difference(copy, second, keeps_time):
    path = copy.root / EDITED
    status, table = path.stat(), pq.ParquetFile(path).read()
    labels = table["label"].to_numpy().copy()
    labels[0] = 1 - labels[0]
    pq.write_table(
        table.set_column(table.schema.get_field_index("label"), "label", pa.array(labels)), path
    )
    if keeps_time:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    step, found = next(second.steps())
    assert step == "extraction"
    assert any(
        line.startswith("days 2026-01-04 digest is " if keeps_time else "days 2026-01-04 is None")
        for line in found
    )
    is_named = found[-1].startswith("skipped, because written after ") and found[-1].endswith(
        str(EDITED)[5:]
    )
    assert is_named is not keeps_time


def test_missing_days_of_lake_and_deleted_weights_of_parent_are_named(copy, tmp_path, capsys):
    line = ["2", "--store", str(copy.root / "store"), "--work", str(tmp_path)]
    shutil.rmtree((copy.root / EDITED).parent)
    assert main(line) == 2
    assert (
        "contains no rows of 2026-01-04, expected the training days of model"
        in capsys.readouterr().err
    )
    parent = copy.rounds[0].training.model_id
    shutil.rmtree(copy.root / "store" / "models" / parent / "weights")
    assert main(line) == 2
    assert f"weights of parent {parent} are absent" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("step", "line"),
    [
        ("extraction", "num_malformed is 3, expected 0"),
        ("validation", "reference.npz is "),
        ("preprocessing", "admission.npz is "),
        ("training", "weights: 1 of "),
    ],
)
def test_planted_difference_of_step_is_reported_first(copy, second, monkeypatch, step, line):
    """The remaining steps are replaced by copies of the original run's outputs."""
    this = copy.rounds[1]
    own_work = local_path(this.extraction.train_uri).parents[1]

    def hand_over(self, name, **inputs):
        made, manifest = self.folder / RUN / name, self.folder / f"{name}.json"
        shutil.copytree(own_work / name, made)
        shutil.copyfile(this.paths[name], manifest)
        if name == "validation":
            shutil.copyfile(this.paths["valid"], inputs["valid_dataset"])
        if name == step:
            plant(name, made, manifest)
        return manifest

    def plant(name, made, manifest):
        if name == "extraction":
            replace(RawDataset.read(manifest), num_malformed=3).write(manifest)
        elif name == "training":
            model = Model.read(manifest)
            shutil.copytree(local_path(model.uri), made / "model")
            add_to_bias(made / "model" / "weights", 0.25)
            sha256 = {**model.sha256, "weights": sha256_tree(made / "model" / "weights")}
            replace(model, uri=(made / "model").as_uri(), sha256=sha256).write(manifest)
        else:
            with open(
                made
                / {"validation": "reference.npz", "preprocessing": "workflow/admission.npz"}[name],
                "ab",
            ) as file:
                file.write(b" ")

    monkeypatch.setattr(Reproduction, "_run", hand_over)
    found = dict(second.steps())
    assert list(found) == STEPS
    assert next(name for name in STEPS if found[name]) == step
    (text,) = [each for each in found[step] if each.startswith(line)]
    assert step != "training" or text.endswith(" tensors, by 0.25 at most")
