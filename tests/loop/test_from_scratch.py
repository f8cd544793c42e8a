"""Tests that the command in the advice works if a run cannot continue the live model."""

import shlex
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from cli.forget import main as forget
from evergreen.config.features import category_of
from evergreen.contracts.manifests import RawDataset
from evergreen.contracts.workflow import FeatureWorkflow
from evergreen.recommender_file.form import parse_recommender
from evergreen.registry.models import model_folder, verdict_paths
from evergreen.registry.promotion_journal import current
from evergreen.storage.uris import local_path
from testing.recommenders import accept_into

FILE = """\
format: evergreen/recommender/1
name: clicks
data: {{label: clicked, request_id: impression, event_time: ts, user: item}}
features:
  numeric: [price, {number}]
  categorical: {{item: {{type: string}}, {category}: {{}}}}
gate: {{min_auc: 0.55}}
preprocessing: {{frequency_threshold: 2}}
"""


@pytest.fixture(scope="module")
def shop(tmp_path_factory, write_clicks, run_to_end):
    """Folder of a live model that uses `age` as a number, and a function that runs commands."""
    folder = tmp_path_factory.mktemp("from scratch") / "a shop"

    def call(*words):
        return run_to_end([*words], output=folder / "command.log", seconds=400)

    accept(folder, number="age", category="shop")
    data = write_clicks(folder / "clicks.csv", 4000)
    lake = ["--lake", str(folder / "lake"), "--store", str(folder / "store")]
    package = str(folder / "retraining.yaml")
    for words in (
        ["data", "ingest", "--data", str(data), *lake],
        ["compile", "--output", package],
        ["run", "--package", package, "--folder", str(folder)],
    ):
        ended = call(*words)
        assert ended.code == 0, ended.output
    return folder, call


def accept(folder: Path, **columns: str) -> None:
    accept_into(folder / "store", parse_recommender(FILE.format(**columns), source="clicks.yaml"))


def words_of(line: str) -> list[str]:
    program, *words = shlex.split(line)
    assert program == "evergreen"
    return words


def test_column_of_another_kind_is_trained_by_command_that_refusal_names(shop):
    folder, call = shop
    accept(folder, number="shop", category="age")
    ended = call("run", "--package", str(folder / "retraining.yaml"), "--folder", str(folder))
    assert ended.code == 3
    assert "change the kind of ['shop', 'age']" in ended.output
    way_on = ended.output.splitlines()[-1]
    assert way_on.startswith("next: evergreen run ")
    ended = call(*words_of(way_on.removeprefix("next: ")))
    assert ended.code == 0, ended.output
    live = current(folder / "store")
    assert live.version == 2
    workflow = FeatureWorkflow.load(model_folder(folder / "store", live.model_id) / "workflow")
    assert workflow.features.categorical == ("item", "age")
    assert "next: " not in ended.output


def test_forgotten_user_is_in_no_model_after_command_that_forget_prints(shop, capsys):
    folder, call = shop
    flags = [f"--{name}={folder / name}" for name in ("store", "lake", "work")]
    assert forget(["--user=item 7", "--yes", *flags]) == 0
    output = capsys.readouterr().out
    before = current(folder / "store")
    assert (
        f"version {before.version} still contains the user, until a run from scratch is released:"
        in output
    )
    command = next(line for line in output.splitlines() if line.startswith("  evergreen run "))
    ended = call(*words_of(command))
    assert ended.code == 0, ended.output
    live = current(folder / "store")
    assert live.version == before.version + 1
    workflow = FeatureWorkflow.load(model_folder(folder / "store", live.model_id) / "workflow")
    vocabulary = workflow.vocabularies[workflow.features.slots.index("item")]
    assert category_of("item 8") in vocabulary
    assert category_of("item 7") not in vocabulary
    raw = RawDataset.read(verdict_paths(folder / "store", live.model_id)[1])
    for uri in (raw.train_uri, raw.holdout_uri):
        items = pq.read_table(local_path(uri), columns=["item"])["item"].to_pylist()
        assert category_of("item 8") in items
        assert category_of("item 7") not in items
    assert forget(["--user=item 7", *flags]) == 0
    untrained = f"the live version {live.version} was not trained on the user's rows"
    assert untrained in capsys.readouterr().out
