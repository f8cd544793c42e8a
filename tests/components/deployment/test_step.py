"""Tests of the deployment step as a command and as a KFP component."""

import dataclasses
import errno
import json
import re
from types import SimpleNamespace

import pytest

from components.deployment.__main__ import main
from components.deployment.component import deployment
from controller.deployment_target import TargetSettings
from controller.reconcile import reconciled
from controller.rollback import rollback
from evergreen.contracts.manifests import RawDataset, Release, Verdict
from evergreen.contracts.requests import CANCELLED
from evergreen.registry import requests, runs
from evergreen.registry.models import keep_verdict
from evergreen.registry.promotion_journal import canary_at_work, current
from evergreen.registry.requests import read_requests
from evergreen.runtime.errors import ContractError
from evergreen.storage.uris import local_path
from testing.controllers import answering, answering_in_process
from testing.recommenders import accept_into, shop_with
from testing.served_names import MODEL_NAME
from tests.support.file_modes import argo_umask, too_open


@pytest.fixture
def step(make_candidate, tmp_path):
    """Runs the step for an accepted or a refused model."""
    store, paths = (
        tmp_path / "store",
        {True: tmp_path / "accepted.json", False: tmp_path / "refused.json"},
    )

    def evaluate(accepted, seed, **changes):
        """Write evaluation's verdict on a model of the registry."""
        _, verdict, raw = make_candidate(store, seed, accepted=accepted)
        keep_verdict(store, dataclasses.replace(verdict, **changes), raw).write(paths[accepted])

    evaluate(True, 1)
    evaluate(False, 2)

    def run(accepted, name, *, release=None, urls=(), controller=answering, **other):
        verdict = Verdict.read(paths[accepted])
        raw = RawDataset.read(local_path(verdict.raw_dataset.uri))
        raw = dataclasses.replace(raw, recommender=shop_with(release=release or {}))
        keep_verdict(store, verdict, raw).write(paths[accepted])
        flags = {
            "run": name,
            "store": store,
            "answer-seconds": 30,
            "verdict": paths[accepted],
            "output": tmp_path / "release.json",
        }
        target = TargetSettings(
            store=store,
            repository=str(tmp_path / "repository"),
            recommender=MODEL_NAME,
            triton_urls=urls,
        )
        with controller(target):
            return main([f"--{key}={value}" for key, value in {**flags, **other}.items()])

    run.evaluate, run.paths = evaluate, paths
    return run


def test_step_writes_its_manifest_and_notes_and_signs_with_run(step, tmp_path):
    assert step(True, "run-1") == 0
    assert Release.read(tmp_path / "release.json").version == 1
    [note] = runs.read_notes(tmp_path / "store", "run-1")
    assert note.facts["version"] == 1
    assert note.reason == f"version 1 is published; {Verdict.read(step.paths[True]).reason}"
    assert current(tmp_path / "store").who == "run-1"


def test_release_under_argos_umask_is_open_to_triton_alone(step, tmp_path):
    """Triton runs as another user.

    Other users may not read the registry. Only the owner may write to the registry and the
    repository.
    """
    accept_into(tmp_path / "store", shop_with())  # names the model for the controller
    made_before = set(too_open(tmp_path / "store", 0))
    with argo_umask():  # a controller in this process would change the umask of the step
        assert step(True, "run-1", controller=answering_in_process) == 0
    left = too_open(tmp_path / "store", 0o640).keys() - made_before
    assert left == set()
    assert {"journal.jsonl", "runs/run-1/deployment.json"} <= too_open(tmp_path / "store", 0).keys()
    repository = tmp_path / "repository"
    assert too_open(repository, 0o644) == {}
    unreadable = [
        p
        for p in repository.rglob("*")
        if not p.name.startswith(".") and not p.stat().st_mode & 0o004
    ]
    assert unreadable == []
    assert repository.stat().st_mode & 0o777 == 0o755


def test_model_not_to_be_released_is_stored_and_can_be_promoted_by_hand(step, tmp_path):
    assert step(True, "run-1", release={"rollout": "none"}) == 1
    [note] = runs.read_notes(tmp_path / "store", "run-1")
    assert (note.state, note.facts) == ("refused", {"rollout": "none"})
    assert "model-1 is stored and not released, because rollout is none" in note.reason
    assert not (tmp_path / "release.json").exists()
    assert current(tmp_path / "store") is None
    assert step(True, "run-2") == 0, "a second run must be able to release the same model"


@pytest.mark.parametrize(
    ("rollout", "decision", "is_first", "done"),
    [
        ("auto", "pass", False, "full"),
        ("auto", "inconclusive", False, "canary"),
        ("auto", "inconclusive", True, "full"),
        ("canary", "pass", False, "canary"),
        ("shadow", "inconclusive", False, "shadow"),
        ("full", "pass", True, "full"),
    ],
)
def test_rollout_follows_verdict_where_it_is_auto(
    step, tmp_path, rollout, decision, is_first, done
):
    store = tmp_path / "store"
    if not is_first:
        assert step(True, "run-1", release={"rollout": "full"}) == 0
        step.evaluate(True, 3, champion_model_id=current(store).model_id)
    path = step.paths[True]
    dataclasses.replace(Verdict.read(path), decision=decision).write(path)
    assert step(True, "run-2", release={"rollout": rollout}) == 0
    [note] = runs.read_notes(store, "run-2")
    assert note.facts["rollout"] == done
    is_live = current(store).version == note.facts["version"]
    assert (is_live, canary_at_work(store) is not None) == (done == "full", done != "full")


def test_full_rollout_needs_pass_and_none_accepts_refused_model(step, tmp_path, capsys):
    path = step.paths[True]
    dataclasses.replace(Verdict.read(path), decision="inconclusive").write(path)
    assert step(True, "run-1", release={"rollout": "full"}) == 1
    assert "rollout is full and the verdict inconclusive" in capsys.readouterr().err
    assert step(False, "run-2") == 1
    assert current(tmp_path / "store") is None


def test_first_version_of_step_killed_before_its_note_is_released_at_once(step, tmp_path):
    path = step.paths[True]
    dataclasses.replace(Verdict.read(path), decision="inconclusive").write(path)
    for _ in range(2):
        assert step(True, "run-1") == 0
    [note] = runs.read_notes(tmp_path / "store", "run-1")
    assert (note.facts["rollout"], note.facts["version"]) == ("full", 1)


def test_invalid_input_exits_with_2_and_unresponsive_server_with_3(step, capsys):
    assert step(True, "run-4", urls=("127.0.0.1:9",)) == 3
    assert "triton 127.0.0.1:9: liveness failed" in capsys.readouterr().err
    assert step(True, "run-5", release={"instances": 0}) == 2
    assert "instances is 0" in capsys.readouterr().err


def test_full_disk_exits_with_3_and_not_as_refused_model(step, tmp_path, capsys):
    """Exit code 1 of the deployment step means that the gate refused the model.

    Python also exits with 1 after a traceback, so the step must catch the error.
    """
    (tmp_path / "store" / "graphs").write_text("no folder")
    assert step(True, "run-7") == 3
    assert "error: " in capsys.readouterr().err
    assert current(tmp_path / "store") is None


def test_request_that_cannot_be_appended_exits_with_3_and_keeps_no_prepared_version(
    step, tmp_path, capsys, monkeypatch
):
    def full(store, request):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(requests, "append_entry", full)
    assert step(True, "run-8") == 3
    assert "No space left on device" in capsys.readouterr().err
    assert list((tmp_path / "store" / "prepared").iterdir()) == []


@pytest.fixture
def arguments(make_candidate, tmp_path):
    store = tmp_path / "store"
    _, verdict, raw = make_candidate(store, 1)
    keep_verdict(store, verdict, raw).write(tmp_path / "verdict")
    target = TargetSettings(
        store=store, repository=str(tmp_path / "a repository"), recommender=MODEL_NAME
    )
    arguments = {
        "run": "run-1",
        "run_resource": "x",
        "run_id": "",
        "server": "python",
        "device": "cpu",
        "trigger_id": "",
        "store": store.as_uri(),
        "verdict": SimpleNamespace(path=str(tmp_path / "verdict")),
        "release": SimpleNamespace(path=str(tmp_path / "outputs" / "release")),
        "card": SimpleNamespace(path=str(tmp_path / "outputs" / "card")),
    }
    with answering(target):
        yield arguments


@pytest.mark.parametrize(
    ("name", "path"),
    [("raw_dataset", "verdicts/model-1/raw_dataset.json"), ("model", "models/model-1/model.json")],
)
def test_verdict_is_released_only_with_evaluated_files(step, tmp_path, capsys, name, path):
    file = tmp_path / "store" / path
    assert getattr(Verdict.read(step.paths[True]), name).uri == file.as_uri()
    line = ["--run=r", f"--store={tmp_path / 'store'}"]
    line += [f"--verdict={step.paths[True]}", f"--output={tmp_path / 'release.json'}"]
    file.write_text(file.read_text().replace('"digest"', '"another"'))
    assert main(line) == 2
    assert re.search(
        f"error: {re.escape(str(file))} has sha256 [0-9a-f]{{64}}, expected ",
        capsys.readouterr().err,
    )
    assert current(tmp_path / "store") is None


def test_component_writes_release_manifest_with_parity_difference(arguments):
    deployment.python_func(**arguments)
    with open(arguments["release"].path) as file:
        written = json.load(file)
    assert (written["kind"], written["version"], written["trigger_id"]) == ("Release", 1, None)
    assert 0 <= written["parity_max_abs_diff"] <= 1e-5


def test_component_with_stale_verdict_ends_without_release_or_retry(arguments, tmp_path):
    stale = Verdict.read(arguments["verdict"].path)
    dataclasses.replace(stale, champion_model_id="model-0", champion_reference="current").write(
        arguments["verdict"].path
    )
    deployment.python_func(**arguments)
    assert not (tmp_path / "outputs" / "release").exists()
    card = (tmp_path / "outputs" / "card").read_text()
    assert "deployment refused" in card
    assert "compared with model-0" in card
    [note] = runs.read_notes(tmp_path / "store", "run-1")
    assert (note.state, "compared with model-0" in note.reason) == ("refused", True)


def test_request_that_no_controller_accepts_is_withdrawn_and_never_carried_out(
    make_candidate, tmp_path, capsys
):
    store, verdict = tmp_path / "store", tmp_path / "verdict.json"
    _, passed, raw = make_candidate(store, 1)
    keep_verdict(store, passed, raw).write(verdict)
    flags = {"run": "r", "store": store, "verdict": verdict, "output": tmp_path / "release.json"}
    words = [f"--{key}={value}" for key, value in flags.items()]
    assert main([*words, "--answer-seconds=0"]) == 3
    assert "no controller answered until" in capsys.readouterr().err
    [state] = read_requests(store)
    assert state.result.action == CANCELLED
    target = TargetSettings(
        store=store, repository=str(tmp_path / "repository"), recommender="shop"
    )
    with reconciled(target):
        pass
    assert current(store) is None
    assert list((store / "prepared").iterdir()) == []


def test_retry_after_a_rollback_reports_the_first_answer_and_changes_nothing(step, tmp_path):
    store = tmp_path / "store"
    assert step(True, "run-1") == 0
    step.evaluate(True, 3, champion_model_id=current(store).model_id)
    assert step(True, "run-2") == 0
    target = TargetSettings(store=store, repository=str(tmp_path / "repository"))
    assert rollback(target, reason="it is slow").version == 1
    lines = len(read_requests(store))
    assert step(True, "run-2") == 0
    [note] = runs.read_notes(store, "run-2")
    assert note.facts["version"] == Release.read(tmp_path / "release.json").version == 2
    assert note.reason.startswith(
        "version 2 was released for this run earlier, and is no longer served"
    )
    assert (current(store).version, len(read_requests(store))) == (1, lines)


def test_retry_of_a_step_that_was_rolled_back_before_its_release_is_refused(step, tmp_path, capsys):
    store = tmp_path / "store"
    assert step(True, "run-1") == 0
    step.evaluate(True, 3, champion_model_id=current(store).model_id)
    assert step(True, "run-2", urls=("127.0.0.1:9",)) == 3
    target = TargetSettings(store=store, repository=str(tmp_path / "repository"))
    with pytest.raises(ContractError):  # version 1 is the first
        rollback(target, reason="something is wrong")
    assert step(True, "run-2") == 1
    assert "a later rollback or abort supersedes the request" in capsys.readouterr().err
    assert current(store).version == 1


def test_journal_that_cannot_be_read_now_is_3_and_not_bad_input(step, tmp_path, capsys):
    (tmp_path / "store" / "journal.jsonl").mkdir()
    assert step(True, "run-1") == 3
    assert "journal.jsonl cannot be read: Is a directory" in capsys.readouterr().err
