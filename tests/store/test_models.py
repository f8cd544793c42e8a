"""The model store's references, the promotion journal, and the notes that explain a run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from components.contracts.manifests import Model, Release, ServingPlace
from components.contracts.retrain_request import CURRENT, NONE
from components.runtime.errors import ContractError, Preempted
from components.store import models as model_store
from components.store import promotion_journal, runs
from components.store.promotion_journal import Promotion, append_promotion, current, read_journal


def release(store, version, model_id):
    """Stores a model and its release, and makes it live."""
    folder = model_store.model_folder(store, model_id)
    Model(
        model_id=model_id,
        uri=folder.as_uri(),
        backend="pytorch",
        config={},
        slot_sizes=[],
        parent_model_id=None,
        seed=0,
        num_train_rows=1,
        optimizer_step=1,
        early_stopping={},
        last_event_time="t",
        raw_digest="d",
        sha256={},
        created_at="t",
    ).write(folder / Model.MANIFEST)
    Release(
        model_name="click_model",
        version=version,
        previous_version=version - 1 or None,
        model_id=model_id,
        model_uri=folder.as_uri(),
        graph_uri="file:///graph",
        sha256={},
        raw_digest="d",
        parity_max_abs_diff=0.0,
        parity_rows=1,
        repository_uri="file:///repository",
        trigger_id=None,
        reason="pass",
        published_at="t",
    ).write(model_store.release_path(store, version))
    append_promotion(store, promotion(store, version, model_id))


def promotion(store, version, model_id, action=promotion_journal.RELEASE):
    return Promotion(
        time=f"2026-01-0{version}",
        action=action,
        version=version,
        previous_version=version - 1 or None,
        model_id=model_id,
        model_uri=model_store.model_folder(store, model_id).as_uri(),
        release_uri=model_store.release_path(store, version).as_uri(),
        trigger_id=None,
        reason="größer: \u2028 ok",
    )


@pytest.fixture
def store(tmp_path):
    """A store whose live model is `second`, released after `first`; its path needs quoting in a URI."""
    store = tmp_path / "model store #1"
    release(store, 1, "first")
    release(store, 2, "second")
    return store


def test_current_names_what_is_live(store):
    assert model_store.champion(store, CURRENT).version == 2
    assert model_store.parent(store, CURRENT).model_id == "second"


def test_none_names_nothing(store):
    assert model_store.champion(store, NONE) is None
    assert model_store.parent(store, NONE) is None


def test_current_names_nothing_in_an_empty_store(tmp_path):
    assert model_store.champion(tmp_path, CURRENT) is None
    assert model_store.parent(tmp_path, CURRENT) is None


def test_model_may_be_named_by_its_id(store):
    assert model_store.champion(store, "first").version == 1
    assert model_store.parent(store, "first").model_id == "first"


def test_unknown_reference_is_refused(store):
    with pytest.raises(ContractError, match="champion 'third' was never released"):
        model_store.champion(store, "third")
    with pytest.raises(ContractError, match="parent 'third' is not in the model store"):
        model_store.parent(store, "third")


def test_rollback_makes_the_earlier_model_the_champion(store):
    append_promotion(store, promotion(store, 1, "first", promotion_journal.ROLLBACK))
    assert model_store.champion(store, CURRENT).model_id == "first"
    assert [p.action for p in read_journal(store)] == ["release", "release", "rollback"]


def test_torn_last_line_of_the_journal_does_not_count_now_or_later(store):
    journal = store / promotion_journal.JOURNAL_FILE
    whole = read_journal(store)
    third = replace(whole[1], version=3)
    for length in (1, 40, len(json.dumps(vars(third)))):
        with open(journal, "a") as file:
            file.write(json.dumps(vars(third))[:length])
        assert read_journal(store) == whole
        append_promotion(store, replace(third, reason="after the crash"))
        whole = read_journal(store)
        assert whole[-1].reason == "after the crash"
        assert current(store) == whole[-1]


@pytest.mark.parametrize("line", [b"{}\n", b"[1]\n", b"nonsense\n", b"\xff\n", b"\n"], ids=repr)
def test_whole_line_that_is_no_promotion_is_refused_by_number(store, line):
    with open(store / promotion_journal.JOURNAL_FILE, "ab") as file:
        file.write(line)
    with pytest.raises(ContractError, match=r"journal\.jsonl line 3 is not a promotion"):
        read_journal(store)


def test_step_is_running_while_it_runs_and_done_after(tmp_path):
    with runs.noted(tmp_path, "run-1", "training") as note:
        (running,) = runs.read_notes(tmp_path, "run-1")
        assert (running.state, running.seconds) == ("running", None)
        note.facts["auc"] = 0.75
    (done,) = runs.read_notes(tmp_path, "run-1")
    assert (done.state, done.facts) == ("done", {"auc": 0.75})
    assert done.seconds >= 0


def test_failed_step_keeps_its_error(tmp_path):
    with pytest.raises(ValueError, match="bad"), runs.noted(tmp_path, "run-1", "training") as note:  # noqa: PT012
        note.facts["rows"] = 5
        raise ValueError("bad rows")
    (failed,) = runs.read_notes(tmp_path, "run-1")
    assert (failed.state, failed.reason, failed.facts) == ("failed", "ValueError: bad rows", {"rows": 5})


def test_a_retry_that_succeeds_makes_a_failed_step_a_done_one(tmp_path):
    with pytest.raises(ValueError, match="bad"), runs.noted(tmp_path, "run-1", "training") as note:  # noqa: PT012
        note.facts["rows"] = 5
        raise ValueError("bad rows")
    with runs.noted(tmp_path, "run-1", "training"):
        (again,) = runs.read_notes(tmp_path, "run-1")
        assert (again.state, again.reason, again.facts) == ("running", "", {})
    (done,) = runs.read_notes(tmp_path, "run-1")
    assert (done.state, done.reason) == ("done", "")


@pytest.mark.parametrize("run", ["", ".", "..", "a/b", "../../elsewhere", "/etc"])
def test_a_run_whose_name_would_lead_out_of_its_folder_is_refused(tmp_path, run):
    with pytest.raises(ContractError, match="run is named"), runs.noted(tmp_path / "store", run, "training"):
        pytest.fail("the step must not begin: it would remove the folder of that name")
    assert list(tmp_path.iterdir()) == []


def test_step_that_is_stopped_is_a_failed_step(tmp_path):
    with pytest.raises(KeyboardInterrupt), runs.noted(tmp_path, "run-1", "training"):
        raise KeyboardInterrupt
    assert runs.read_notes(tmp_path, "run-1")[0].state == "failed"


def test_preempted_step_is_not_a_failed_one(tmp_path):
    with pytest.raises(Preempted), runs.noted(tmp_path, "run-1", "training"):
        raise Preempted("saved at epoch 2")
    (note,) = runs.read_notes(tmp_path, "run-1")
    assert (note.state, note.reason) == ("preempted", "saved at epoch 2")


def test_refusal_survives_the_end_of_the_step(tmp_path):
    with runs.noted(tmp_path, "run-1", "evaluation") as note:
        note.state, note.reason = "refused", "auc too low"
    assert runs.read_notes(tmp_path, "run-1")[0].state == "refused"


def test_notes_come_in_step_order_without_steps_that_never_started(tmp_path):
    for step in ("training", "extraction"):
        with runs.noted(tmp_path, "run-1", step):
            pass
    assert [n.step for n in runs.read_notes(tmp_path, "run-1")] == ["extraction", "training"]
    assert runs.read_notes(tmp_path, "run-2") == []


def test_newest_outcome_of_a_trigger_is_found(tmp_path):
    assert runs.find_outcome(tmp_path, "t-1") is None
    for run, trigger, ended in (("a", "t-1", "2026-01-01"), ("b", "t-1", "2026-01-02"), ("c", "t-2", "2026-01-03")):
        runs.write_outcome(
            tmp_path,
            runs.RunOutcome(
                run=run, trigger_id=trigger, state="released", step="", reason="", version=1, ended_at=ended
            ),
        )
    assert runs.find_outcome(tmp_path, "t-1").run == "b"
    assert runs.find_outcome(tmp_path, "t-3") is None


def test_where_releases_go_is_noted_once_and_read_back(tmp_path):
    assert model_store.read_serving_place(tmp_path) is None
    place = ServingPlace(repository_uri="gs://models/repository", triton_urls=["dns:///triton:8001"], server="python")
    model_store.write_serving_place(tmp_path, place)
    first = (tmp_path / "serving.json").stat().st_ino
    model_store.write_serving_place(tmp_path, place)
    assert (tmp_path / "serving.json").stat().st_ino == first, "an unchanged place is not written again"
    model_store.write_serving_place(tmp_path, replace(place, server="onnxruntime"))
    assert model_store.read_serving_place(tmp_path).server == "onnxruntime"


def test_a_stored_model_is_found_by_its_id(tmp_path):
    release(tmp_path, 1, "a")
    assert model_store.stored_model(tmp_path, "a").model_id == "a"
    with pytest.raises(ContractError, match="'b' is not in the model store"):
        model_store.stored_model(tmp_path, "b")
