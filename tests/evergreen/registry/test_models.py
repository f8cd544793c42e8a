"""Tests of the model registry's references, the promotion journal, and runs' notes."""

from dataclasses import replace

import pytest

from evergreen.contracts.manifests import CURRENT, NONE, ServingTarget
from evergreen.registry import models as registry
from evergreen.registry import promotion_journal, runs
from evergreen.registry.promotion_journal import Promotion, append_promotion
from evergreen.runtime.errors import ContractError, Preempted, Refused
from testing.releases import keep_model, release
from tests.support.errors import raises, says


def make_live(store, version, model_id):
    """Store a model and its release, and make it live."""
    keep_model(store, model_id)
    release(store, version, model_id)
    append_promotion(store, promotion(store, version, model_id))


def promotion(store, version, model_id, action=promotion_journal.RELEASE):
    return Promotion(
        time=f"2026-01-0{version}",
        action=action,
        version=version,
        previous_version=version - 1 or None,
        model_id=model_id,
        model_uri=registry.model_folder(store, model_id).as_uri(),
        release_uri=registry.release_path(store, version).as_uri(),
        trigger_id=None,
        reason="größer: \u2028 ok",
    )


@pytest.fixture
def store(tmp_path):
    """A registry whose live model is `second`, released after `first`.

    The path of the registry needs quoting in a URI.
    """
    store = tmp_path / "model registry #1"
    make_live(store, 1, "first")
    make_live(store, 2, "second")
    return store


@pytest.mark.parametrize(
    ("reference", "version", "model_id"),
    [(CURRENT, 2, "second"), ("first", 1, "first"), (NONE, None, None)],
)
def test_current_is_live_version_none_is_nothing_and_model_is_named_by_id(
    store, reference, version, model_id
):
    champion, parent = registry.champion(store, reference), registry.parent(store, reference)
    assert (champion and champion.version, parent and parent.model_id) == (version, model_id)


def test_nothing_is_live_in_empty_store(tmp_path):
    assert registry.champion(tmp_path, CURRENT) is registry.parent(tmp_path, CURRENT) is None


def test_unknown_reference_is_refused(store):
    with says(ContractError, "never-released"):
        registry.champion(store, "third")
    with raises(ContractError, "parent 'third'", "not in"):
        registry.parent(store, "third")


def test_step_is_running_while_it_runs_and_done_after(tmp_path):
    with runs.step_note(tmp_path, "run-1", "training") as note:
        (running,) = runs.read_notes(tmp_path, "run-1")
        assert (running.state, running.seconds) == ("running", None)
        note.facts["auc"] = 0.75
    (done,) = runs.read_notes(tmp_path, "run-1")
    assert (done.state, done.facts) == ("done", {"auc": 0.75})
    assert done.seconds >= 0


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (ValueError("bad rows"), "failed", "ValueError: bad rows"),
        (KeyboardInterrupt(), "failed", "stopped from outside while it worked"),
        (Preempted("saved at epoch 2"), "preempted", "saved at epoch 2"),
        (Refused("auc too low"), "refused", "auc too low"),
    ],
    ids=["failed", "stopped", "preempted", "refused"],
)
def test_failed_step_keeps_its_reason_until_retry_succeeds(tmp_path, error, state, reason):
    with pytest.raises(type(error)), runs.step_note(tmp_path, "run-1", "training") as note:  # noqa: PT012
        note.facts["rows"] = 5
        raise error
    (ended,) = runs.read_notes(tmp_path, "run-1")
    assert (ended.state, ended.reason, ended.facts) == (state, reason, {"rows": 5})
    with runs.step_note(tmp_path, "run-1", "training"):
        pass
    (done,) = runs.read_notes(tmp_path, "run-1")
    assert (done.state, done.reason, done.facts) == ("done", "", {})


@pytest.mark.parametrize("run", ["", "..", "a/b", "../../elsewhere", "/etc"])
def test_run_name_that_leads_out_of_its_folder_is_refused(tmp_path, run):
    with (
        raises(ContractError, "run", "named"),
        runs.step_note(tmp_path / "store", run, "training"),
    ):
        pytest.fail("the step must not begin: it would remove the folder of that name")
    assert list(tmp_path.iterdir()) == []


def test_notes_come_in_step_order_without_steps_that_never_started(tmp_path):
    for step in ("training", "extraction"):
        with runs.step_note(tmp_path, "run-1", step):
            pass
    assert [n.step for n in runs.read_notes(tmp_path, "run-1")] == ["extraction", "training"]
    assert runs.read_notes(tmp_path, "run-2") == []


def test_outcome_of_run_is_found_by_runs_name(tmp_path):
    assert runs.find_outcome(tmp_path, "a") is None
    ended = {"state": "released", "step": "", "reason": "", "version": 1, "ended_at": "2026-01-01"}
    runs.write_outcome(tmp_path, runs.RunOutcome(run="a", trigger_id="", **ended))
    assert runs.find_outcome(tmp_path, "a").run == "a"
    assert runs.find_outcome(tmp_path, "b") is None


def test_settings_of_releases_are_stored_once_and_read_back(tmp_path):
    assert registry.read_serving_target(tmp_path) is None
    place = ServingTarget(
        repository_uri="gs://models/repository", triton_urls=["dns:///triton:8001"], server="python"
    )
    registry.write_serving_target(tmp_path, place)
    first = (tmp_path / "serving.json").stat().st_ino
    registry.write_serving_target(tmp_path, place)
    assert (tmp_path / "serving.json").stat().st_ino == first, (
        "unchanged settings must not be written again"
    )
    registry.write_serving_target(tmp_path, replace(place, server="onnxruntime"))
    assert registry.read_serving_target(tmp_path).server == "onnxruntime"
