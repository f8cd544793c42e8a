"""Tests of six steps in six processes: each step reads the output of the previous step."""

import json
import subprocess
from dataclasses import replace

import numpy as np
import pytest

from demo.environments import python_of
from evergreen.contracts import criteo
from evergreen.contracts.manifests import Model
from evergreen.contracts.serving import CATEGORICAL_INPUT, DENSE_INPUT, PROBABILITY_OUTPUT
from evergreen.storage.uris import local_path
from monitoring.released_models import ReleasedModels

pytestmark = pytest.mark.timeout(900)

READ = """
import json, sys, pyarrow, pyarrow.parquet as pq
from pathlib import Path
table = pyarrow.concat_tables([pq.ParquetFile(path).read() for path in sorted(Path(sys.argv[1]).glob("*.parquet"))])
print(json.dumps({
    "types": {field.name: str(field.type) for field in table.schema},
    "nulls": {name: table[name].null_count for name in table.column_names},
    "sum": sum(value or 0 for name in sys.argv[2:] for value in table[name].to_pylist()),
    "first": str(table["event_time"][0].as_py()),
}))
"""  # noqa: E501


def _graph(release, dense, categorical):
    import onnxruntime

    session = onnxruntime.InferenceSession(
        str(local_path(release.graph_uri)), providers=["CPUExecutionProvider"]
    )
    inputs = {DENSE_INPUT: dense, CATEGORICAL_INPUT: categorical}
    return session.run([PROBABILITY_OUTPUT.name], inputs)[0].ravel()


def _scores(verdict):
    with np.load(local_path(verdict.scores_uri), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


@pytest.mark.parametrize("environment", ["validation", "preprocessing", "training"])
def test_raw_rows_of_driver_equal_those_of_older_readers(chain, environment):
    raw = chain.rounds[0].extraction
    command = ["-c", READ, str(local_path(raw.train_uri)), *criteo.CATEGORICAL]
    pythons = [python_of(name) for name in ("driver", environment)]
    serving = [
        subprocess.run([p, *command], capture_output=True, text=True, check=True).stdout
        for p in pythons
    ]
    assert json.loads(serving[0]) == json.loads(serving[1])
    spelled = {"float32": "float", "float64": "double"}
    arrows_names = {name: spelled.get(kind, kind) for name, kind in criteo.RAW_TYPES.items()}
    assert json.loads(serving[0])["types"] == arrows_names
    assert sum(json.loads(serving[0])["nulls"].values()) > 0


def test_rows_are_neither_lost_nor_added(chain):
    held_out = chain.rounds[0].extraction.num_holdout_rows
    for this, rows in zip(chain.rounds, (3000, held_out + 2000)):
        raw, encoded = this.extraction, this.preprocessing
        assert raw.num_train_rows + raw.num_holdout_rows == rows
        assert (encoded.num_train_rows, encoded.num_holdout_rows) == (
            raw.num_train_rows,
            raw.num_holdout_rows,
        )
        assert this.validation.num_rows == raw.num_train_rows
        assert this.evaluation.num_rows == this.deployment.parity_rows == raw.num_holdout_rows


def test_every_manifest_names_same_data(chain):
    for this in chain.rounds:
        digests = {
            getattr(this, step).raw_digest
            for step in ("validation", "preprocessing", "training", "deployment")
        }
        assert digests == {this.extraction.digest}
        assert this.training.last_event_time == this.extraction.last_event_time
        assert (
            this.training.watermark == this.extraction.watermark < this.extraction.last_event_time
        )
        assert this.training.window_start == this.extraction.window_start
    assert chain.rounds[0].extraction.digest != chain.rounds[1].extraction.digest


@pytest.mark.parametrize("turn", [0, 1])
def test_served_graph_gives_raw_rows_same_scores_as_training(chain, held_out_rows, turn):
    this = chain.rounds[turn]
    dense, categorical, _ = held_out_rows(this.extraction)
    expected = _scores(this.evaluation)["candidate"]
    difference = np.abs(_graph(this.deployment, dense, categorical) - expected).max()
    assert difference <= 1e-5
    assert this.deployment.parity_max_abs_diff <= 1e-5
    assert np.ptp(expected) > 0.05, "constant scores would pass every comparison"


def test_champion_is_scored_as_when_it_was_candidate(chain):
    first, again = chain.rounds[0], chain.same_rows
    assert again.champion_model_id == first.training.model_id
    as_champion, as_candidate = _scores(again)["champion"], _scores(first.evaluation)["candidate"]
    np.testing.assert_allclose(as_champion, as_candidate, atol=1e-6, rtol=0)
    assert again.difference.auc == pytest.approx(0.0, abs=1e-6)


def test_champion_of_second_round_has_scores_of_released_graph(chain, held_out_rows):
    first, second = chain.rounds
    assert second.evaluation.champion_model_id == first.training.model_id
    dense, categorical, _ = held_out_rows(second.extraction)
    released = _graph(first.deployment, dense, categorical)
    np.testing.assert_allclose(_scores(second.evaluation)["champion"], released, atol=1e-5, rtol=0)


def test_second_model_continues_first(chain):
    first, second = (this.training for this in chain.rounds)
    assert (first.parent_model_id, second.parent_model_id) == (None, first.model_id)
    assert second.optimizer_step > first.optimizer_step
    assert local_path(chain.rounds[1].preprocessing.parent_model_uri) == local_path(first.uri)
    assert second.config == first.config
    for model in (first, second):
        published = Model.read(local_path(model.uri) / Model.MANIFEST)
        assert published == replace(model, training_set=None)


def test_drift_is_measured_against_champions_own_statistics(chain):
    first, second = chain.rounds
    assert (first.validation.parent_statistics_uri, first.validation.drift) == (None, [])
    parents = local_path(second.validation.parent_statistics_uri)
    assert parents.read_bytes() == (local_path(first.training.uri) / Model.STATISTICS).read_bytes()
    assert {entry["feature"] for entry in second.validation.drift} >= set(criteo.FEATURES)
    assert next(e for e in second.validation.drift if e["feature"] == "C1")["effect"] is not None


def test_monitor_finds_each_versions_own_training_statistics(chain):
    find = ReleasedModels(local_path(chain.uri("store"))).reference
    for turn in chain.rounds:
        found = find(turn.deployment.version)
        assert found.rows == turn.extraction.num_train_rows
        assert found.scores.counts.sum() == turn.extraction.num_holdout_rows
