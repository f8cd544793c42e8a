"""Tests of the facts about a released version, read from real manifests in a model registry."""

from dataclasses import MISSING, fields
from datetime import datetime

import pytest

from evergreen.contracts.manifests import ModelQuality, Release, Verdict
from evergreen.registry.models import release_path, verdict_paths
from monitoring.policies.policy import Baseline
from monitoring.released_models import ReleasedModels
from testing.releases import store_model

BLANK = {"str": "x", "str | None": None, "int": 1, "float": 0.0, "int | None": None, "bool": True}


def _is_required(field):
    return field.default is MISSING and field.default_factory is MISSING


def blank(manifest, **values):
    """Return a manifest with the fields in `values`. Other required fields are empty."""
    unset = {
        f.name: BLANK.get(str(f.type), {})
        for f in fields(manifest)
        if f.name not in values and _is_required(f)
    }
    return manifest(**unset, **values)


def store_released(store, *, version=7, model_id="m1", candidate=None, newest_row=None):
    blank(Release, version=version, model_id=model_id).write(release_path(store, version))
    if newest_row is not None:
        store_model(store, model_id, watermark=newest_row)
    if candidate is not None:
        blank(Verdict, candidate_model_id=model_id, candidate=ModelQuality(**candidate)).write(
            verdict_paths(store, model_id)[0]
        )


GATE = {"auc": 0.8, "auc_low": 0.79, "auc_high": 0.81, "log_loss": 0.4}
TRAINED_UNTIL = "2026-01-02T03:04:05+00:00"


def test_gate_auc_and_newest_training_row_of_released_model_are_found(tmp_path):
    store_released(tmp_path, candidate=GATE, newest_row=TRAINED_UNTIL)
    trained_until = datetime.fromisoformat(TRAINED_UNTIL).timestamp()
    assert ReleasedModels(tmp_path).baseline(7) == Baseline(
        auc=0.8, low=0.79, high=0.81, trained_until=trained_until
    )


@pytest.mark.parametrize(
    "candidate", [None, {"auc": None, "auc_low": None, "auc_high": None}, {}], ids=str
)
def test_version_without_verdict_or_auc_has_no_gates_auc(tmp_path, candidate):
    store_released(tmp_path, candidate=candidate, newest_row=TRAINED_UNTIL)
    known = ReleasedModels(tmp_path).baseline(7)
    assert (known.auc, known.low, known.high) == (None, None, None)
    assert known.trained_until is not None
    assert ReleasedModels(tmp_path).baseline(8) is None, "version 8 was never released"


@pytest.mark.parametrize("trained_until", [None, "", "yesterday"])
def test_training_rows_of_model_are_unknown_if_its_manifest_lacks_them(
    tmp_path, trained_until, caplog
):
    store_released(tmp_path, candidate=GATE, newest_row=trained_until)
    assert ReleasedModels(tmp_path).baseline(7) == Baseline(auc=0.8, low=0.79, high=0.81)
    assert "the training rows of model version 7 are unknown" in caplog.text


@pytest.mark.parametrize("harmed", ["verdict", "release"])
def test_unreadable_file_is_reported_and_ends_no_monitor(tmp_path, caplog, harmed):
    store_released(tmp_path, candidate=GATE, newest_row=TRAINED_UNTIL)
    path = verdict_paths(tmp_path, "m1")[0] if harmed == "verdict" else release_path(tmp_path, 7)
    path.write_text("{")
    known = ReleasedModels(tmp_path).baseline(7)
    assert known is None if harmed == "release" else known.auc is None
    assert "the baseline of version 7 is unknown" in caplog.text
