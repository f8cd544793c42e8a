"""A canary that a person starts from the command line: it is served as the live version is."""

from __future__ import annotations

from components.contracts.serving import CANARY_NAME
from components.deployment.canary.__main__ import main
from components.deployment.release import ReleaseSettings, release
from components.deployment.repository.triton_config import ServingOptions, read_options
from components.store.models import keep_verdict


def test_a_canary_started_by_hand_is_served_with_the_live_versions_options(tmp_path, make_candidate, capsys):
    store, repository = tmp_path / "store", tmp_path / "repository"
    settings = ReleaseSettings(
        store=store, repository=str(repository), options=ServingOptions(instances=3, response_cache=True)
    )
    release(*make_candidate(store, 1), settings)
    _, verdict, raw = make_candidate(store, 2)
    keep_verdict(store, verdict, raw)
    assert main(["start", "--store", str(store), "--model-id", "model-2"]) == 0
    assert "version 2 is the canary" in capsys.readouterr().out
    assert read_options((repository / CANARY_NAME / "config.pbtxt").read_text()) == settings.options


def test_a_model_that_was_never_judged_is_no_canary(tmp_path, make_candidate, capsys):
    store = tmp_path / "store"
    release(*make_candidate(store, 1), ReleaseSettings(store=store, repository=str(tmp_path / "repository")))
    make_candidate(store, 2)
    assert main(["start", "--store", str(store), "--model-id", "model-2"]) == 2
    assert "model-2 was never judged" in capsys.readouterr().err
