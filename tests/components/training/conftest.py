"""Fixtures for training: planted data, training sets, a report, and the test double of HugeCTR."""

import gc
import importlib
import os
from dataclasses import replace
from datetime import datetime, timezone

import pytest

from components.training.__main__ import main
from components.training.hugectr.guard import GUARDED
from evergreen.config.data import ColumnNames
from evergreen.contracts.manifests import Model, ValidationReport
from evergreen.registry.runs import read_notes
from evergreen.runtime.flags import run_flags
from evergreen.storage.references import keep
from testing.paths import REPOSITORY
from testing.recommenders import shop_with
from tests.support.logistic_engine import SETTINGS, fitted
from tests.support.planted_rows import STEP_MODEL, PlantedRows, training_sets
from tests.support.torchrec_workers import Workers

# The number of threads is as in the step, because tests share their cores with other work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

DOUBLE = REPOSITORY / "tests" / "hugectr_double"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move tests with two TorchRec workers to the end, because starting a group takes seconds."""
    items.sort(key=lambda item: "torchrec 2" in item.name or " in two" in item.name)


def pytest_collection_finish() -> None:
    """Freeze the imported objects, because HugeCTR's engine collects garbage after each model."""
    gc.freeze()


@pytest.fixture
def planted():
    return PlantedRows()


@pytest.fixture
def make_training_set(tmp_path):
    """Writes rows, workflow and manifest, and returns the TrainingSet."""
    return training_sets(tmp_path)


@pytest.fixture
def validation_report(tmp_path):
    """A validation report with its two artifacts on disk."""
    folder = tmp_path / "validation"
    folder.mkdir()
    (folder / "statistics.pb").write_bytes(b"statistics")
    (folder / "schema.pbtxt").write_text("schema")
    (folder / "reference.npz").write_text("reference")
    names = {"statistics": "statistics.pb", "schema": "schema.pbtxt", "reference": "reference.npz"}
    names |= {"report": "report.html", "json": "report.json"}
    uris = {f"{part}_uri": (folder / name).as_uri() for part, name in names.items()} | {
        "parent_statistics_uri": None
    }
    return ValidationReport(
        decision="pass", checks=[], drift=[], num_rows=1, raw_digest="digest", **uris
    )


@pytest.fixture
def step_flags(tmp_path, validation_report):
    """Writes a training set's manifest and returns the step's flags for it."""

    def flags_of(training_set, /, *, model=STEP_MODEL, training=None, weight=None, **changed):
        recommender = shop_with(model=model, training={"batch_size": 256, **(training or {})})
        recommender = replace(recommender, data=ColumnNames(weight=weight))
        report = keep(validation_report, tmp_path / "report.json")
        handed_on = replace(training_set, recommender=recommender, validation_report=report)
        handed_on.write(tmp_path / "training_set.json")
        values = {
            "run": "r1",
            "store": (tmp_path / "a store").as_uri(),
            "work": str(tmp_path / "a work"),
            "training_set": tmp_path / "training_set.json",
            "output": tmp_path / "out" / "model.json",
            **changed,
        }
        return run_flags(**values)

    return flags_of


@pytest.fixture
def step(tmp_path, step_flags):
    """Runs the command.

    Returns the exit code, the manifest or None, and the numbers of the step's note.
    """

    def run(training_set, /, **changed):
        code = main(step_flags(training_set, **changed))
        if code:
            return code, None, {}
        (note,) = [
            n
            for n in read_notes(tmp_path / "a store", changed.get("run", "r1"))
            if n.step == "training"
        ]
        numbers = {
            name: value
            for name, value in note.facts.items()
            if name not in ("model", "parent", "threads")
        }
        return code, Model.read(tmp_path / "out" / "model.json"), numbers

    return run


@pytest.fixture
def train_run(tmp_path, validation_report):
    """Runs the whole step and returns the model in the registry."""
    from components.training.step import TrainingRun, train

    def go(training_set, *, config, settings, name="r", backend="pytorch", **keywords):
        positions = {"store": tmp_path / "store", "work": tmp_path / "work"}
        training_run = TrainingRun(
            run=name, **positions, backend=backend, config=config, settings=settings
        )
        now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
        return train(training_run, training_set, validation_report, clock=lambda: now, **keywords)[
            0
        ]

    return go


@pytest.fixture
def double(monkeypatch):
    """The module `hugectr` of the test double.

    The training step uses this module, and runs in the test's own process. Where HugeCTR would
    abort or hang, the test double then raises `double_fate.Died`.
    """
    monkeypatch.setenv(GUARDED, "1")
    monkeypatch.syspath_prepend(str(DOUBLE))
    importlib.import_module("double_fate").raise_instead()
    return importlib.import_module("hugectr")


@pytest.fixture(scope="session")
def workers():
    """TorchRec's workers, led by the test process."""
    group = Workers()
    yield group
    group.end()


@pytest.fixture
def run(tmp_path):
    """Fits with the NumPy engine and returns the result, the engine and the emitted lines."""
    count = iter(range(1000))

    def go(training_set, settings=SETTINGS, path=None, **keywords):
        return fitted(
            training_set, settings, path or tmp_path / f"checkpoint {next(count)}", **keywords
        )

    return go
