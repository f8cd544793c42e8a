"""Tests of `evergreen audit compare`: two stored models score rows on which they did not train."""

import json
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pyarrow.parquet as pq
import pytest

from cli.compare import _differing, compare, comparison_text, main
from evergreen.config.model import network_config
from evergreen.contracts.manifests import AucLead, Model
from evergreen.contracts.raw_rows import EVENT_TIME
from evergreen.registry.models import model_folder, stored_model, verdict_paths
from evergreen.runtime.durable import sha256_tree
from evergreen.statistics.metrics import auc_difference, log_loss
from evergreen.storage.uris import local_path
from testing.recommenders import shop_with
from testing.releases import make_live, release, store_model
from tests.components.evaluation.conftest import CONFIG, write_candidate

TRAINED_UNTIL = "2025-10-09T00:00:00+00:00"


@pytest.fixture
def two(make_round):
    """A run with the planted model as candidate, and a noisy model `older`."""
    made = make_round(3000)
    noisy = made.planted.noisy(1.0, 8)
    for model_id, linear, settings in (
        ("older", noisy, {}),
        ("candidate", made.planted, {"training": {"learning_rate": 0.5}}),
    ):
        folder = model_folder(made.store, model_id)
        if model_id == "older":
            write_candidate(folder / Model.WEIGHTS, linear)
        made.workflow.save(folder / Model.WORKFLOW)
        store_model(
            made.store,
            model_id,
            config=CONFIG.as_document(),
            slot_sizes=made.workflow.slot_sizes,
            sha256={"weights": sha256_tree(folder / Model.WEIGHTS)},
            watermark=TRAINED_UNTIL if model_id == "candidate" else "2025-06-01T00:00:00+00:00",
            recommender=shop_with(**settings),
        )
    made.raw.write(verdict_paths(made.store, "candidate")[1])
    return made, noisy


def test_difference_and_its_interval_are_those_of_formulas_scores(two, capsys):
    made, noisy = two
    assert main(["older", "candidate", "--store", str(made.store), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    a, b = made.scores(noisy), made.scores(made.planted)
    groups = np.arange(len(a)) // 10  # Ten rows form a request, see `raw_table`.
    expected = auc_difference(made.labels, b, a, groups=groups)
    lead = found["quality"]["difference"]
    assert [lead["auc"], lead["low"], lead["high"]] == pytest.approx(
        [expected.auc, expected.low, expected.high], abs=1e-5
    )
    assert lead["low"] > 0, "the planted model must be better than the noisy model"
    assert found["quality"]["champion"]["log_loss"] == pytest.approx(
        log_loss(made.labels, a), abs=1e-5
    )
    assert (found["rows_of"], found["quality"]["num_rows"]) == ("candidate", 3000)
    assert {
        name: found["differing"][name] for name in ("training.learning_rate", "trained up to")
    } == {
        "training.learning_rate": [None, 0.5],
        "trained up to": ["2025-06-01T00:00:00+00:00", TRAINED_UNTIL],
    }
    assert found["sizes"]["category ids"] == [sum(made.workflow.slot_sizes)] * 2
    assert not any(part["name"].startswith("categories") for part in found["slices"])
    assert sum(each["num_rows"] for each in found["calibration_a"]) == 3000


def test_changed_setting_of_network_is_listed_once_by_its_name(two):
    made, _ = two
    models = [
        store_model(
            made.store,
            f"tower-{width}",
            config=network_config(recommender).as_document(),
            recommender=recommender,
        )
        for width in (8, 16)
        for recommender in [shop_with(model={"tower": [width]})]
    ]
    assert dict(_differing(*models)) == {"model.tower": ([8], [16])}


@pytest.mark.parametrize(
    ("low", "high", "shown", "says_unknown"),
    [
        (-0.002338, 0.003931, "[-0.0023, +0.0039]", True),
        (0.0001, 0.0015, "[+0.0001, +0.0015]", False),
        (None, None, "[–, –]", True),
    ],
)
def test_text_reports_if_rows_do_not_show_which_model_is_better(
    two, low, high, shown, says_unknown
):
    made, _ = two
    found = compare(
        made.store, stored_model(made.store, "older"), stored_model(made.store, "candidate")
    )
    lead = AucLead(auc=0.0008, low=low, high=high, p_value=0.5)
    found = replace(found, quality=replace(found.quality, difference=lead))
    text = comparison_text(found)
    assert f"+0.0008 {shown}" in text
    assert ("do not show which" in text or "too few" in text) == says_unknown


def test_other_order_negates_difference_and_versions_name_models(two, capsys, tmp_path):
    made, _ = two
    make_live(made.store, release(made.store, 7, "candidate"))
    page = tmp_path / "page.html"
    assert main(["7", "older", "--store", str(made.store), "--output", str(page)]) == 0
    assert "AUC, B minus A: -0." in capsys.readouterr().out
    assert "training.learning_rate" in page.read_text()


def test_training_rows_of_either_model_are_no_evaluation_rows(two, capsys):
    made, _ = two
    times = pq.read_table(local_path(made.raw.holdout_uri), columns=[EVENT_TIME])[
        EVENT_TIME
    ].to_pylist()
    middle = sorted(times)[1499]
    for model_id, trained_time in (("older", middle), ("candidate", middle + timedelta(seconds=1))):
        path = model_folder(made.store, model_id) / Model.MANIFEST
        replace(Model.read(path), watermark=trained_time.isoformat()).write(path)
    assert main(["older", "candidate", "--store", str(made.store), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["quality"]["num_rows"] == sum(
        time > middle for time in times
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["older", "nobody"], "model 'nobody' is not in the model registry"),
        (["older", "3"], "version 3 is not in the model registry"),
    ],
)
def test_models_that_are_not_there_are_named(two, capfd, words, said):
    made, _ = two
    assert main([*words, "--store", str(made.store)]) == 2
    assert said in capfd.readouterr().err


def test_rows_that_were_collected_are_named(two, capfd):
    made, _ = two
    replace(made.raw, holdout_uri=(made.root / "gone").as_uri()).write(
        verdict_paths(made.store, "candidate")[1]
    )
    assert main(["older", "candidate", "--store", str(made.store)]) == 2
    assert "are removed with the work folder of their run" in capfd.readouterr().err
