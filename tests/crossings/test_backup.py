"""Tests of backup and restore after a lost disk: some data is restored, and some is not."""

import hashlib
import io
import itertools
import json
import os
import shutil
import sqlite3
import threading
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import pytest

from cli.__main__ import main as evergreen
from cli.backup import main, restore
from controller.verify import verify
from demo.simulation.simulator import Drift, Simulator, write_lake
from evergreen.storage.folder import FolderObjects
from tests.support.crashes import Kill
from tests.support.monitors import Bench, prediction, publish, traffic

pytestmark = pytest.mark.timeout(300)

FOLDERS = ("state", "archive", "store", "repository", "lake")


def flags(root: Path) -> list[str]:
    return [*(f"--{name}={root / name}" for name in FOLDERS), f"--log={root / 'log.db'}"]


def contents(root):
    paths = [path for name in FOLDERS[2:] for path in (root / name).rglob("*") if path.is_file()]
    return {path.relative_to(root): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def models(root, capsys):
    capsys.readouterr()
    assert evergreen(["models", "list", "--store", str(root / "store")]) == 0
    return capsys.readouterr().out


def names(rows):
    return {row["request_id"].partition("-")[0] for row in rows}


@contextmanager
def at_work(bench):
    """Publish records while the monitor reads them in its own thread."""
    begun, ends = threading.Event(), threading.Event()

    def work():
        for number in itertools.count():
            bench.tick(prediction(f"flow-{number}", 1, time=bench.clock.now, version=2))
            begun.set()
            if ends.is_set():
                return

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(30)
    try:
        yield
    finally:
        ends.set()
        thread.join()


def test_lost_disk_is_restored_from_backup_and_pipeline_continues(chain, tmp_path, capsys):
    root, backup = tmp_path / "a monitor", tmp_path / "other disk" / "backup"
    backup.parent.mkdir()
    mine = chain.copied_to(root)
    bench = Bench(tmp_path, archive_roll_seconds=1.0)
    bench.start()
    traffic(bench, "archived", auc="good", version=2)
    bench.turn(5, 1.0)
    assert names(bench.archived) == {"archived"}
    publish(bench.log, prediction("open-1", 8, time=bench.clock.now, version=2))
    bench.turn(1, 1.0)
    publish(bench.log, prediction("waiting-1", 8, time=bench.clock.now, version=2))
    before, listed = contents(root), models(root, capsys)
    with at_work(bench):
        assert main(["backup", *flags(root), f"--output={backup}"]) == 0

    traffic(bench, "after", auc="good", version=2)
    bench.turn(5, 1.0)
    mine.go_back(1)
    assert models(root, capsys) != listed
    bench.close()
    shutil.rmtree(root)
    root.mkdir()
    assert main(["restore", str(backup), f"--within={root.parent}"]) == 0

    assert contents(root) == before
    assert models(root, capsys) == listed
    assert evergreen(["models", "live-at", "now", "--store", str(root / "store")]) == 0
    assert capsys.readouterr().out.startswith("version 2, ")
    assert verify(2, root / "store", FolderObjects(root / "lake")).same
    again = Bench(tmp_path, archive_roll_seconds=1.0)
    again.clock.now = bench.clock.now
    again.start()
    again.turn(20, 100.0)
    assert names(again.archived) == {"archived", "open", "waiting", "flow"}
    flow = {
        int(row["request_id"][5:]) for row in again.archived if row["request_id"].startswith("flow")
    }
    assert flow == set(range(len(flow))), (
        "the backup must contain a prefix of the published requests"
    )
    assert len({(row["request_id"], row["row"]) for row in again.archived}) == len(again.archived)
    again.close()
    simulator = Simulator.create(seed=3).drifted(Drift(seed=5))
    write_lake(simulator, str(root / "lake"), rows=2000, days=1, last_day=date(2026, 1, 6), seed=9)
    assert mine.turn("round-3").deployment.version == 3


@pytest.fixture
def installation(tmp_path):
    root = tmp_path / "installation"
    for name in FOLDERS:
        (root / name).mkdir(parents=True)
        (root / name / "file").write_text(name)
    for path in (root / "log.db", root / "state" / "monitor.db"):
        with sqlite3.connect(path) as database:
            database.execute("CREATE TABLE t (x)")
    return root


def test_foreign_file_in_place_of_part_is_never_overwritten(installation, tmp_path, capsys):
    assert main(["backup", *flags(installation), f"--output={tmp_path / 'b'}"]) == 0
    assert main(["backup", *flags(installation), f"--output={tmp_path / 'b'}"]) == 2
    assert "b exists, expected a new folder" in capsys.readouterr().err
    (installation / "state" / "file").write_text("written since")
    assert main(["restore", str(tmp_path / "b"), "--yes"]) == 2
    assert f"expected an absent or empty {installation / 'state'}" in capsys.readouterr().err
    assert main(["restore", str(installation)]) == 2
    assert "backup.json is absent" in capsys.readouterr().err


def test_release_during_copy_leaves_no_backup(installation, tmp_path, monkeypatch, capsys):
    journal, copytree = installation / "store" / "journal.jsonl", shutil.copytree
    journal.write_text("one\n")

    def copy(source, target, **options):
        if source.name == "lake":
            journal.write_text("one\ntwo\n")
        return copytree(source, target, **options)

    monkeypatch.setattr(shutil, "copytree", copy)
    assert main(["backup", *flags(installation), f"--output={tmp_path / 'b'}"]) == 3
    assert "journal.jsonl grew while it was copied" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["installation"]


@pytest.fixture
def lost(installation, tmp_path):
    """The backup of a lost installation, and a description of the lost content."""
    for number in range(5):
        (installation / "lake" / "day=2026-01-01").mkdir(exist_ok=True)
        path = installation / "lake" / "day=2026-01-01" / f"part-{number}.parquet"
        path.write_bytes(bytes([number]) * 1000)
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
    (installation / "store" / "latest").symlink_to("file")
    (installation / "archive" / "day=2026-01-02").mkdir()
    assert main(["backup", *flags(installation), f"--output={tmp_path / 'b'}"]) == 0
    before = everything(installation)
    shutil.rmtree(installation)
    return tmp_path / "b", before


def everything(root):
    """Return each path below `root` with its kind, content and time.

    Only plain files other than databases have content and time. All other paths have None.
    """
    found = {}
    for path in root.rglob("*"):
        is_plain = path.is_file() and path.suffix != ".db"
        content = (
            (path.read_bytes(), path.stat().st_mtime)
            if is_plain and not path.is_symlink()
            else None
        )
        found[path.relative_to(root)] = (path.is_symlink(), path.is_dir(), content)
    return found


def test_restore_killed_before_any_file_continues_at_next_call(lost, installation_root):
    backup, before = lost
    for number in (0, 1, 3, 5):
        with Kill(number).watch(os, "replace") as kill:
            restore(backup, within=installation_root.parent, confirm=no)
        assert kill.is_dead
        # The folders also contain leftover files of a power cut.
        (installation_root / "lake" / f".file.{'0a' * 16}").write_bytes(b"half")
    restore(backup, within=installation_root.parent, confirm=no)
    assert everything(installation_root) == before
    restore(backup, within=installation_root.parent, confirm=no)
    assert everything(installation_root) == before, "a repeated call must change nothing"


@pytest.fixture
def installation_root(tmp_path):
    return tmp_path / "installation"


def no(locations):
    return False


def test_corrupt_file_of_backup_is_named_and_not_restored(lost, installation_root, capsys):
    backup, _ = lost
    path = backup / "lake" / "day=2026-01-01" / "part-3.parquet"
    right = path.read_bytes()
    path.write_bytes(right[:-1] + b"?")
    assert main(["restore", str(backup), "--yes"]) == 2
    assert f"{path} has sha256" in capsys.readouterr().err
    assert not (installation_root / "lake" / "day=2026-01-01" / path.name).exists()
    path.unlink()
    assert main(["restore", str(backup), "--yes"]) == 2
    assert f"{path} is absent" in capsys.readouterr().err
    path.write_bytes(right)
    assert main(["restore", str(backup), "--yes"]) == 0


def test_changes_after_killed_restore_are_not_overwritten(lost, installation_root, capsys):
    backup, _ = lost
    assert main(["restore", str(backup), "--yes"]) == 0
    path = installation_root / "store" / "file"
    for change in (
        lambda: path.write_text("new"),
        lambda: path.with_name("other").write_text("new"),
    ):
        change()
        assert main(["restore", str(backup), "--yes"]) == 2
        assert (
            f"expected an absent or empty {installation_root / 'store'}" in capsys.readouterr().err
        )
        path.write_text("store")


def test_restore_writes_nowhere_that_person_did_not_name(
    lost, installation_root, tmp_path, capsys, monkeypatch
):
    backup, before = lost
    (tmp_path / "elsewhere").mkdir()
    assert main(["restore", str(backup), f"--within={tmp_path / 'elsewhere'}"]) == 2
    assert f"expected a folder within {tmp_path / 'elsewhere'}" in capsys.readouterr().err
    assert main(["restore", str(backup)]) == 2
    output = capsys.readouterr().err
    assert "expected --within FOLDER or --yes" in output
    assert f"lake: {installation_root / 'lake'}" in output
    for answer, code in (("", 1), ("n\n", 1), ("y\n", 0)):
        terminal = io.StringIO(answer)
        terminal.isatty = lambda: True
        monkeypatch.setattr("sys.stdin", terminal)
        assert not installation_root.exists()
        assert main(["restore", str(backup)]) == code
        assert f"lake: {installation_root / 'lake'}" in capsys.readouterr().out
    assert everything(installation_root) == before


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("locations", {"store": "/etc/../etc"}),
        ("locations", {"store": "relative"}),
        ("locations", {"home": "/root"}),
        ("files", {"store/../../x": "0"}),
        ("files", {"/etc/passwd": "0"}),
        ("files", {"other/x": "0"}),
        ("files", {"store/latest/x": "0"}),
    ],
)
def test_backup_that_leads_elsewhere_is_refused(lost, installation_root, capsys, key, change):
    backup, _ = lost
    document = json.loads((backup / "backup.json").read_text())
    document[key] |= change
    del document["crc32"]
    (backup / "backup.json").write_text(json.dumps(document))
    assert main(["restore", str(backup), "--yes"]) == 2
    assert "backup.json: " in capsys.readouterr().err
    assert not installation_root.exists()


def test_files_of_killed_backup_are_removed_by_next_backup(installation, tmp_path):
    left = tmp_path / f".b.{'0a' * 16}"
    left.mkdir()
    (left / "half").write_bytes(bytes(1000))
    assert main(["backup", *flags(installation), f"--output={tmp_path / 'b'}"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "installation"]
