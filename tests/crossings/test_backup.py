"""Backup and restore: what they bring back after a lost disk, and what they do not."""

import hashlib
import itertools
import shutil
import sqlite3
import threading
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import pytest

from components.deployment.verify import verify
from components.storage.folder import FolderObjects
from inference_client.simulation.world import Drift, World, write_lake
from pipelines.__main__ import main as evergreen
from pipelines.backup import main
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
    assert evergreen(["models", "--store", str(root / "store")]) == 0
    return capsys.readouterr().out


def names(rows):
    return {row["request_id"].partition("-")[0] for row in rows}


@contextmanager
def at_work(bench):
    """Records come and the monitor takes them, in a thread of its own."""
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


def test_a_lost_disk_comes_back_as_of_its_backup_and_the_loop_goes_on(chain, tmp_path, capsys):
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
    before, told = contents(root), models(root, capsys)
    with at_work(bench):
        assert main(["backup", *flags(root), f"--output={backup}"]) == 0

    traffic(bench, "after", auc="good", version=2)
    bench.turn(5, 1.0)
    mine.go_back(1)
    assert models(root, capsys) != told
    bench.close()
    shutil.rmtree(root)
    root.mkdir()
    assert main(["restore", str(backup)]) == 0

    assert contents(root) == before
    assert models(root, capsys) == told
    assert evergreen(["live-at", "now", "--store", str(root / "store")]) == 0
    assert capsys.readouterr().out.startswith("version 2, ")
    assert verify(2, root / "store", FolderObjects(root / "lake")).same
    again = Bench(tmp_path, archive_roll_seconds=1.0)
    again.clock.now = bench.clock.now
    again.start()
    again.turn(20, 100.0)
    assert names(again.archived) == {"archived", "open", "waiting", "flow"}
    flow = {int(row["request_id"][5:]) for row in again.archived if row["request_id"].startswith("flow")}
    assert flow == set(range(len(flow))), "what was published up to a moment, and nothing of what came after"
    assert len({(row["request_id"], row["row"]) for row in again.archived}) == len(again.archived)
    again.close()
    world = World.create(seed=3).drifted(Drift(seed=5))
    write_lake(world, str(root / "lake"), rows=2000, days=1, last_day=date(2026, 1, 6), seed=9)
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


def test_what_lies_where_a_part_belongs_is_never_written_over(installation, tmp_path, capsys):
    assert main(["backup", *flags(installation), f"--output={tmp_path / 'b'}"]) == 0
    assert main(["backup", *flags(installation), f"--output={tmp_path / 'b'}"]) == 2
    assert "b exists, expected a new folder" in capsys.readouterr().err
    assert main(["restore", str(tmp_path / "b")]) == 2
    assert f"state belongs to {installation / 'state'}, which holds files" in capsys.readouterr().err
    assert main(["restore", str(installation)]) == 2
    assert "places.json is absent" in capsys.readouterr().err


def test_release_under_the_copys_hands_leaves_no_backup(installation, tmp_path, monkeypatch, capsys):
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
