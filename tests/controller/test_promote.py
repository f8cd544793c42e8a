"""Tests of manual promotion: it can override the gate, but not the parity check."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from controller.promote import main
from controller.release import ReleaseSettings
from evergreen.registry.models import keep_verdict
from evergreen.registry.promotion_journal import append_promotion, current, read_journal
from evergreen.serving.repository.triton_config import ServingOptions
from tests.support.deployments import release


@pytest.fixture
def settings(tmp_path):
    return ReleaseSettings(
        store=tmp_path / "store",
        repository=str(tmp_path / "repository"),
        options=ServingOptions(server="onnxruntime"),
    )


@pytest.fixture
def promote(settings):
    return lambda model_id, reason="we know better": main(
        ["--store", str(settings.store), "--model-id", model_id, "--override", reason]
    )


@pytest.fixture
def live(settings, make_candidate):
    return release(*make_candidate(settings.store, 1), settings=settings)


def test_refused_model_goes_live_with_who_why_and_decision_of_gate(
    settings, live, make_candidate, promote, capsys
):
    _, verdict, raw = make_candidate(settings.store, 2, accepted=False)
    keep_verdict(settings.store, verdict, raw)
    assert promote("model-2") == 0
    assert "version 2 is live, model model-2 (was 1)" in capsys.readouterr().out
    entry = current(settings.store)
    assert (entry.action, entry.decision, entry.version) == ("promote", "fail", 2)
    assert entry.reason == "we know better; the verdict was: auc is high enough"
    assert "@" in entry.who
    config = (Path(settings.repository) / "click_model" / "config.pbtxt").read_text()
    assert "count: 2" in config, "the model must be served with the former options"


def test_model_whose_verdict_is_stale_goes_live(settings, live, make_candidate, promote):
    _, verdict, raw = make_candidate(settings.store, 2)
    stale = dataclasses.replace(verdict, champion_model_id="model-0", champion_reference="current")
    keep_verdict(settings.store, stale, raw)
    assert promote("model-2") == 0
    assert [entry.action for entry in read_journal(settings.store)] == ["release", "promote"]


def test_promotion_of_model_that_was_rolled_back_reports_it(
    settings, live, make_candidate, promote, capsys
):
    candidate = make_candidate(settings.store, 2)
    keep_verdict(settings.store, *candidate[1:])
    release(*candidate, settings=settings)
    line = dataclasses.replace(
        current(settings.store),
        action="rollback",
        version=1,
        model_id="model-1",
        previous_version=2,
        who="controller",
        reason="the AUC fell",
        blocked_model_id="model-2",
    )
    append_promotion(settings.store, line)
    assert promote("model-2") == 0
    said = capsys.readouterr().err
    assert "model model-2 was rolled back from version 2 at " in said
    assert "by controller (the AUC fell)" in said
    assert current(settings.store).model_id == "model-2"


def test_parity_is_checked_nevertheless(
    settings, live, make_candidate, with_scores, promote, tmp_path, capsys
):
    _, verdict, raw = make_candidate(settings.store, 2, accepted=False)
    keep_verdict(
        settings.store,
        with_scores(verdict, lambda scores: scores + np.float32(1e-3), tmp_path),
        raw,
    )
    assert promote("model-2") == 2
    assert "graph differs from the training-side score" in capsys.readouterr().err
    assert current(settings.store).version == 1


def test_unevaluated_or_unknown_model_is_named(settings, live, make_candidate, promote, capsys):
    make_candidate(settings.store, 2)
    assert promote("model-2") == 2
    assert "model-2 was never evaluated" in capsys.readouterr().err
    assert promote("model-9") == 2
    assert "'model-9' is not in the model registry" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        promote("model-2", " ")
    assert "argument --override: is empty" in capsys.readouterr().err


def test_promotion_during_canary_is_refused_and_changes_nothing(
    settings, live, make_candidate, promote, capsys
):
    _, verdict, raw = make_candidate(settings.store, 3)
    keep_verdict(settings.store, verdict, raw)
    line = dataclasses.replace(current(settings.store), action="canary", version=2, share=0.05)
    append_promotion(settings.store, line)
    assert promote("model-3") == 1
    assert "version 2 is a running canary" in capsys.readouterr().err
    assert current(settings.store).version == 1
