"""Tests of deletion by age: only complete folders are deleted, if no rollback needs them."""

import os
import shutil
from dataclasses import replace
from datetime import datetime, timezone

import pytest

from evergreen.contracts.manifests import Model
from evergreen.registry import collect
from evergreen.registry.models import graph_folder, model_folder
from evergreen.registry.promotion_journal import CANARY, append_promotion, read_journal
from evergreen.registry.runs import RunOutcome, write_outcome
from testing.releases import make_live, release, store_model
from tests.support.crashes import Killed

NOW = datetime(2026, 6, 30, tzinfo=timezone.utc)


@pytest.fixture
def installation(tmp_path):
    """Registry with six versions, an old canary, an unreleased model and three runs.

    The versions are one month apart.
    """
    store, work = tmp_path / "a store", tmp_path / "work"
    for version in range(1, 7):
        at = f"2026-0{version}-01T00:00:00+00:00"
        _store_model(store, f"m{version}", at)
        made = release(
            store, version, f"m{version}", published_at=at, previous_version=version - 1 or None
        )
        _fill(graph_folder(store, version))
        make_live(store, made)
    _store_model(store, "refused", "2026-01-05T00:00:00+00:00")
    for run, at in (
        ("old", "2026-02-01T00:00:00+00:00"),
        ("new", "2026-06-29T00:00:00+00:00"),
        ("at-work", None),
    ):
        _fill(work / run)
        if at:
            ended = {
                "trigger_id": run,
                "state": "released",
                "step": "deployment",
                "reason": "",
                "version": 1,
            }
            write_outcome(store, RunOutcome(run=run, ended_at=at, **ended))
    _fill(work / "nobody's")
    return store, work


def _store_model(store, model_id, created_at):
    store_model(store, model_id, created_at=created_at)
    for part in ("weights", "workflow", "statistics"):
        _fill(model_folder(store, model_id) / part)


def _fill(folder):
    folder.mkdir(parents=True)
    (folder / "bytes").write_bytes(b"x" * 1000)


def run(installation, *flags):
    store, work = installation
    return collect.main(
        ["--store", str(store), "--work", str(work), "--keep-versions", "3", *flags], now=NOW
    )


def left(installation):
    store, work = installation
    return (
        sorted(path.parent.name for path in (store / "models").glob(f"*/{Model.WEIGHTS}")),
        sorted(path.name for path in (store / "graphs").iterdir()),
        sorted(path.name for path in work.iterdir()),
    )


def test_unneeded_models_are_deleted_and_all_others_stay(installation, capsys):
    store, _ = installation
    before = left(installation)
    assert run(installation) == 0
    assert left(installation) == before, "without --yes files are only listed"
    assert "folders can be removed; --yes removes them" in capsys.readouterr().out
    assert run(installation, "--yes") == 0
    assert left(installation) == (
        ["m4", "m5", "m6"],
        ["4", "5", "6"],
        ["at-work", "new", "nobody's"],
    )
    assert "work of run old, ended 2026-02-01" in (output := capsys.readouterr().out)
    assert "weights of model refused" in output
    remaining = {
        path.name: sorted(each.name for each in path.iterdir())
        for path in (store / "models").iterdir()
    }
    assert remaining == {
        name: [
            Model.MANIFEST,
            *(["statistics", "weights", "workflow"] if name in ("m4", "m5", "m6") else []),
        ]
        for name in ("m1", "m2", "m3", "m4", "m5", "m6", "refused")
    }
    assert all((model_folder(store, f"m{n}") / Model.MANIFEST).exists() for n in range(1, 7)), (
        "manifests of deleted models must remain"
    )
    assert run(installation) == 0
    assert "nothing to remove" in capsys.readouterr().out


def test_version_rolled_back_to_and_canary_stay_however_old_they_are(installation):
    store, _ = installation
    first, *_, live = read_journal(store)
    append_promotion(
        store, replace(live, action="rollback", version=1, model_id="m1", previous_version=6)
    )
    append_promotion(
        store,
        replace(first, action=CANARY, version=2, model_id="m2", share=0.01, time=NOW.isoformat()),
    )
    run(installation, "--yes", "--keep-versions", "2")
    assert left(installation)[:2] == (["m1", "m2", "m6"], ["1", "2", "6"])


def test_rollback_target_stays_although_newer_versions_were_live_since(installation):
    store, _ = installation
    *_, live = read_journal(store)
    back = {"version": 4, "model_id": "m4", "previous_version": 6}
    append_promotion(store, replace(live, action="rollback", time=NOW.isoformat(), **back))
    run(installation, "--yes", "--keep-versions", "2")
    assert left(installation)[1] == ["3", "4", "6"]


def test_files_newer_than_age_limit_stay(installation):
    run(installation, "--yes", "--days", "150")
    assert left(installation) == (
        ["m2", "m3", "m4", "m5", "m6"],
        ["2", "3", "4", "5", "6"],
        ["at-work", "new", "nobody's", "old"],
    )


@pytest.mark.parametrize("number", range(5))
def test_command_killed_anywhere_leaves_complete_folders_and_next_finishes(
    installation, monkeypatch, number
):
    removed = []

    def remove(path):
        removed.append(path)
        if len(removed) == number + 1:
            next(path.rglob("bytes")).unlink()
            raise Killed
        shutil.rmtree(path)

    with monkeypatch.context() as patched:
        patched.setattr(collect.shutil, "rmtree", remove)
        with pytest.raises(Killed):
            run(installation, "--yes")
    store, work = installation
    folders = [
        *store.glob(f"models/*/{Model.WEIGHTS}"),
        *store.glob("graphs/[0-9]"),
        *work.glob("[!.]*"),
    ]
    named = [path for path in folders if not path.name.endswith(".collected")]
    assert all((path / "bytes").exists() for path in named)
    run(installation, "--yes")
    assert left(installation) == (
        ["m4", "m5", "m6"],
        ["4", "5", "6"],
        ["at-work", "new", "nobody's"],
    )


@pytest.mark.parametrize("flags", [["--days", "0.5"], ["--keep-versions", "1"]])
def test_limits_without_rollback_target_are_refused(installation, flags, capsys):
    assert run(installation, *flags) == 2
    assert "expected 1 to 36,500 days, and at least 2 versions" in capsys.readouterr().err


@pytest.mark.parametrize("days", ["nan", "inf", "0.5", "-1", "1e300", "36501"])
def test_invalid_days_are_refused(installation, capsys, days):
    before = left(installation)
    assert run(installation, "--yes", "--days", days) == 2
    assert "expected 1 to 36,500 days" in capsys.readouterr().err
    assert left(installation) == before


def test_files_of_killed_writes_are_removed_and_newer_ones_stay(installation, capsys):
    store, work = installation
    name = f".{{}}.{'0a' * 16}"
    folders = [
        store / "models" / name.format("m9"),
        store / "graphs" / name.format("7"),
        work / name.format("run"),
    ]
    folders += [store / "models" / "m6" / name.format("weights")]
    for folder in folders:
        _fill(folder)
    files = [
        store / name.format("journal.jsonl"),
        store / "runs" / "old" / name.format("training.json"),
    ]
    for file in files:
        file.write_bytes(b"half")
    old, new = datetime(2026, 1, 1, tzinfo=timezone.utc).timestamp(), NOW.timestamp() - 60
    for path in [*folders, *(folder / "bytes" for folder in folders), *files]:
        os.utime(path, (old, old))
    # The folder is old, but a file was written into it a minute ago.
    os.utime(folders[0] / "bytes", (new, new))
    os.utime(files[0], (new, new))
    (store / ".hidden").write_bytes(b"a person's")
    os.utime(store / ".hidden", (old, old))
    assert run(installation, "--yes") == 0
    assert "left by a write that was killed" in capsys.readouterr().out
    assert [path for path in (*folders, *files) if path.exists()] == [folders[0], files[0]]
    assert (store / ".hidden").exists()
    assert (model_folder(store, "m6") / "weights" / "bytes").exists()
