"""What the folders of an installation hold, and the room on their disks."""

import shutil

from monitoring.showing import store_status
from monitoring.showing.store_status import SizeWatcher, count_bytes, installation_folders
from tests.support.snapshots import FULL, samples


def test_bytes_of_a_folder_are_those_of_its_files_links_left_out(tmp_path):
    (tmp_path / "deep" / "deeper").mkdir(parents=True)
    (tmp_path / "a").write_bytes(b"x" * 1000)
    (tmp_path / "deep" / "deeper" / "b").write_bytes(b"y" * 234)
    (tmp_path / "deep" / "link").symlink_to(tmp_path / "a")
    (tmp_path / "deep" / "up").symlink_to(tmp_path)
    assert count_bytes(tmp_path) == 1234
    assert count_bytes(tmp_path / "absent") == 0


def test_folders_are_counted_each_hour_beside_the_loop_and_disks_are_asked_each_minute(tmp_path, monkeypatch):
    share, state = tmp_path / "share", tmp_path / "state"
    for folder in (share / "store", share / "lake", state / "archive"):
        folder.mkdir(parents=True)
    (share / "lake" / "part").write_bytes(b"x" * 10)
    (state / "archive" / "part").write_bytes(b"x" * 3)
    free = [700]
    usage = shutil._ntuple_diskusage
    real = shutil.disk_usage
    monkeypatch.setattr(store_status.shutil, "disk_usage", lambda path: (real(path), usage(1000, 300, free[0]))[1])
    counts = []
    folders = installation_folders(state=state, archive=state / "archive", store=share / "store")
    watcher = SizeWatcher(folders, start=counts.append)

    first = watcher.look(1000.0)
    assert first.keys() == {"state", "archive", "store", "lake"}, "work and repository do not exist"
    assert {size.held for size in first.values()} == {None}
    counts[0]()
    free[0] = 600
    assert watcher.look(1059.0) is first
    second = watcher.look(1060.0)
    assert {name: size.held for name, size in second.items()} == {"state": 3, "archive": 3, "store": 0, "lake": 10}
    assert {(size.disk_free, size.disk_size) for size in second.values()} == {(600, 1000)}

    (share / "lake" / "part").unlink()
    watcher.look(4599.0)
    assert len(counts) == 1
    assert watcher.look(4659.0)["lake"].held == 10
    watcher.look(9000.0)
    assert len(counts) == 2, "while one is under way no other begins"
    counts[1]()
    assert watcher.look(9060.0)["lake"].held == 0


def test_sizes_are_metrics_by_folder():
    found = samples(FULL)
    names = ("folder_bytes", "disk_free_bytes", "disk_size_bytes")
    assert [found[f"ctr_monitor_{name}", ("folder", "lake")] for name in names] == [5, 3, 9]
