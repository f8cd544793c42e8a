"""The copies of docs/operations.md: what they bring back after a lost disk, and what they do not."""

import hashlib
import itertools
import re
import shutil
import subprocess
import threading
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import pytest

from components.deployment.verify import verify
from components.storage.folder import FolderObjects
from inference_client.simulation.lake import write_lake
from inference_client.simulation.world import Drift, World
from pipelines.__main__ import main
from tests.support.monitors import Bench, prediction, publish, traffic
from tests.support.paths import REPOSITORY

pytestmark = pytest.mark.timeout(300)

FOLDERS = ("state", "archive", "store", "repository", "lake")


def run_copies(number: int, root: Path, backup: Path) -> None:
    """Runs a block of commands of the page's section, in the page's words."""
    section = (REPOSITORY / "docs" / "operations.md").read_text().partition("## Backup and restore")[2]
    script = re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)[number]
    paths = {name.upper(): str(root / name) for name in FOLDERS} | {"LOG": str(root / "log.db"), "BACKUP": str(backup)}
    subprocess.run(["bash", "-euc", script], env={"PATH": "/usr/bin:/bin", **paths}, check=True, timeout=60)


def contents(root):
    paths = [path for name in FOLDERS[2:] for path in (root / name).rglob("*") if path.is_file()]
    return {path.relative_to(root): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def models(root, capsys):
    assert main(["models", "--store", str(root / "store")]) == 0
    return capsys.readouterr().out


def names(rows):
    return {row["request_id"].partition("-")[0] for row in rows}


@contextmanager
def at_work(bench):
    """Records come and the monitor takes them, in a thread of its own."""
    begun, ends = threading.Event(), threading.Event()

    def work():
        for number in itertools.count():
            publish(bench.log, prediction(f"flow-{number}", 1, time=bench.clock.now, version=2))
            bench.monitor.tick()
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
        run_copies(0, root, backup)

    traffic(bench, "after", auc="good", version=2)
    bench.turn(5, 1.0)
    mine.go_back(1)
    assert models(root, capsys) != told
    bench.close()
    shutil.rmtree(root)
    root.mkdir()
    run_copies(1, root, backup)

    assert contents(root) == before
    assert models(root, capsys) == told
    assert main(["live-at", "now", "--store", str(root / "store")]) == 0
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
