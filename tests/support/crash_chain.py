"""Publisher, monitor and uploader in processes that SIGKILL ends at a given boundary or time.

A process is forked from a process that has imported everything and started no thread (`serve`). A
fork takes 40 ms, whereas the imports would take seconds. There is a boundary before and after every
checkpoint of the product and every `os.fsync`, `rename`, `replace`, `unlink`, `link`, COMMIT and
HTTP request. A kill is requested for a boundary, by its number or its name. Kills at random moments
also hit SQLite inside a COMMIT and Arrow inside a write.
"""

import json
import os
import pickle
import select
import signal
import sqlite3
import subprocess
import sys
import time
import traceback
from pathlib import Path

from testing.recommenders import SHOP
from tests.support.clocks import Clock
from tests.support.crashes import Kill, sigkill

LEASE_SECONDS = 5.0
WINDOW = 30.0


def watch_boundaries(kill: Kill) -> None:
    """Count a step before and after each file operation, HTTP request and COMMIT."""
    import requests

    kill.watch(os, "fsync", "rename", "replace", "unlink", "link", after=True, where=path_in_chain)
    kill.watch(requests.Session, "request", after=True)
    connect = sqlite3.connect

    class Connection(sqlite3.Connection):
        def execute(self, sql, *args):
            if sql.startswith("COMMIT"):
                return kill.around("COMMIT", super().execute, after=True)(sql, *args)
            return super().execute(sql, *args)

    sqlite3.connect = lambda *args, **more: connect(*args, factory=Connection, **more)


def path_in_chain(path, *others) -> str:
    """Describe a file by its folder in the chain, with a mark if the file is temporary."""
    path = Path(os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else path)
    folders = [part for part in path.parts if part in ("archive", "uploaded", "lake", "state")]
    return f" in {'/'.join(folders)}{' of a file aside' if path.name.startswith('.') else ''}"


def publish(order, clock, reach) -> None:
    from evergreen.events.sqlite import SqliteLog

    folder = Path(order["folder"])
    log = SqliteLog(folder / "log.db", lease_seconds=LEASE_SECONDS, clock=clock)
    for batch in pickle.loads((folder / order["messages"]).read_bytes()):
        log.publish(batch)
        reach("publisher.published")


def monitor(order, clock, reach) -> None:
    from evergreen.events.sqlite import SqliteLog
    from monitoring.monitor import Monitor
    from monitoring.state.store import StateStore
    from tests.support.monitors import monitor_settings

    folder = Path(order["folder"])
    settings = monitor_settings(
        folder, attribution_window_seconds=WINDOW, archive_roll_rows=12, archive_roll_seconds=10.0
    )
    log = SqliteLog(folder / "log.db", lease_seconds=LEASE_SECONDS, clock=clock)
    store = StateStore(settings.state / "monitor.db")
    monitor = Monitor(
        settings,
        subscriber=log,
        store=store,
        trigger=None,
        recommender=SHOP,
        clock=clock,
        checkpoint=reach,
    )
    for _ in range(order["ticks"]):
        monitor.tick()
        clock.advance(0.1)
    if order["stop"]:
        monitor.stop()


def upload(order, clock, reach) -> None:
    from evergreen.storage.uris import open_objects
    from monitoring.uploader import Uploader

    Uploader(
        Path(order["folder"]) / "archive",
        open_objects(order["lake"]),
        clock=clock,
        checkpoint=reach,
    ).run_once()


ROLES = {"publisher": publish, "monitor": monitor, "uploader": upload}


def live(order: dict, pipe: int) -> None:
    """Run one role of the chain in a forked process."""
    os.environ.update(order["environment"])
    kill = Kill(
        *order["kill_at"], end=sigkill, report=lambda name: os.write(pipe, f"{name}\n".encode())
    )
    watch_boundaries(kill)
    ROLES[order["role"]](order, Clock(order["now"]), kill.reach)


def serve() -> None:
    """Fork the processes that are requested on stdin, and report the end of each process.

    The processes of one line of stdin run concurrently.
    """
    import google.cloud.storage  # noqa: F401
    import pyarrow.parquet  # noqa: F401

    import evergreen.events.sqlite  # noqa: F401
    import evergreen.storage.bucket  # noqa: F401
    import monitoring.monitor  # noqa: F401
    import monitoring.uploader  # noqa: F401

    for line in sys.stdin:
        lives = []
        for order in json.loads(line):
            listen, report = os.pipe()
            if not (process := os.fork()):
                os.close(listen)
                try:
                    live(order, report)
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            os.close(report)
            lives.append((process, listen, order["kill_after"]))
        print(json.dumps([end_of(*each) for each in lives]), flush=True)


def end_of(process: int, listen: int, kill_after: float | None) -> dict:
    """Wait until a process ends, or kill the process after a number of seconds.

    Returns:
        The status of the process, and the boundaries that the process reached.
    """
    content, deadline = b"", None if kill_after is None else time.monotonic() + kill_after
    while True:
        left = None if deadline is None else max(deadline - time.monotonic(), 0)
        if not select.select([listen], [], [], left)[0]:
            os.kill(process, signal.SIGKILL)
            deadline = None
        elif chunk := os.read(listen, 1 << 16):
            content += chunk
        else:
            break
    os.close(listen)
    status = os.waitpid(process, 0)[1]
    return {
        "status": os.waitstatus_to_exitcode(status),
        "boundaries": content.decode().splitlines(),
    }


class ForkServer:
    """Runs the process that forks all other processes, within a `with` block."""

    def __enter__(self) -> "ForkServer":
        root = Path(__file__).resolve().parents[2]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.crash_chain"],
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def live(self, *orders: dict) -> list[dict]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(orders) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def __exit__(self, *error) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(120)
        finally:
            self._process.kill()
            self._process.wait()


if __name__ == "__main__":
    serve()
