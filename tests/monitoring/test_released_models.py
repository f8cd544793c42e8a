"""What is known of a released version, found through real manifests in a model store."""

from dataclasses import MISSING, fields

import pytest

from components.contracts.manifests import ModelQuality, Release, Verdict
from components.store.models import release_path, verdict_paths
from monitoring.deciding.policy import Baseline
from monitoring.released_models import ReleasedModels

BLANK = {"str": "x", "str | None": None, "int": 1, "float": 0.0, "int | None": None, "bool": True}


def _is_required(field):
    return field.default is MISSING and field.default_factory is MISSING


def blank(manifest, **values):
    """A manifest whose other fields say nothing."""
    unset = {f.name: BLANK.get(str(f.type), {}) for f in fields(manifest) if f.name not in values and _is_required(f)}
    return manifest(**unset, **values)


def keep(store, *, version=7, model_id="m1", candidate=None):
    blank(Release, version=version, model_id=model_id).write(release_path(store, version))
    if candidate is not None:
        blank(Verdict, candidate_model_id=model_id, candidate=ModelQuality(**candidate)).write(
            verdict_paths(store, model_id)[0]
        )


def test_the_gates_auc_of_the_released_model_is_found(tmp_path):
    keep(tmp_path, candidate={"auc": 0.8, "auc_low": 0.79, "auc_high": 0.81, "log_loss": 0.4})
    assert ReleasedModels(tmp_path).baseline(7) == Baseline(auc=0.8, low=0.79, high=0.81)


@pytest.mark.parametrize("candidate", [None, {"auc": None, "auc_low": None, "auc_high": None}, {}], ids=str)
def test_a_version_without_verdict_or_auc_has_no_baseline(tmp_path, candidate):
    keep(tmp_path, candidate=candidate)
    assert ReleasedModels(tmp_path).baseline(7) is None
    assert ReleasedModels(tmp_path).baseline(8) is None, "never released"


def test_a_file_that_cannot_be_read_is_reported_and_ends_no_monitor(tmp_path, caplog):
    keep(tmp_path)
    verdict_paths(tmp_path, "m1")[0].parent.mkdir(parents=True)
    verdict_paths(tmp_path, "m1")[0].write_text("{")
    assert ReleasedModels(tmp_path).baseline(7) is None
    assert "no baseline of version 7" in caplog.text
