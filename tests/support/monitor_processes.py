"""The monitor and the uploader as real processes on one SQLite log."""

import json
import os
import signal
import subprocess
import sys

from evergreen.config.monitor import DecisionSettings
from evergreen.config.reader import flat_settings
from evergreen.events.sqlite import SqliteLog
from testing.paths import REPOSITORY
from testing.processes import Answer, http_get
from testing.recommenders import accept_into, shop_with


class Processes:
    """Monitor and uploader processes that share a folder. All processes end with the test."""

    def __init__(self, folder) -> None:
        self.folder = folder / "with a space"
        self.folder.mkdir()
        self.state, self.archive, self.lake = (
            self.folder / n for n in ("state", "archive", "lake")
        )
        self.log = SqliteLog(self.folder / "log.db")
        self.started: list[subprocess.Popen] = []

    def monitor(self, **flags) -> subprocess.Popen:
        values = {
            "log": f"sqlite:///{self.folder / 'log.db'}?lease_seconds=1".replace(" ", "%20"),
            "state": self.state,
            "archive": self.archive,
            "store": self.folder / "store",
            "http_port": 0,
            "tick_seconds": 0.05,
            "decide_seconds": 0.1,
            "attribution_window_seconds": 1.0,
            "archive_roll_rows": 200,
            **flags,
        }
        rules = {
            name: values.pop(name) for name in flat_settings(DecisionSettings) if name in values
        }
        accept_into(self.folder / "store", shop_with(monitor=rules))
        return self.start("monitoring", values)

    def start(self, module: str, values: dict) -> subprocess.Popen:
        argv = [
            text
            for name, value in values.items()
            for text in ("--" + name.replace("_", "-"), str(value))
        ]
        self.started.append(
            subprocess.Popen(
                [sys.executable, "-m", module, *argv],
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                stderr=open(self.folder / f"{module}.{len(self.started)}.log", "wb"),  # noqa: SIM115
            )
        )
        return self.started[-1]

    def end(self, process: subprocess.Popen, *, seconds: float = 120.0) -> int:
        process.send_signal(signal.SIGTERM)
        return process.wait(seconds)

    def counter(self, name: str) -> float:
        return json.loads(self.page("/status") or "{}").get("counters", {}).get(name, 0)

    def get(self, path: str) -> Answer:
        """Return a page of the monitor, or an empty answer while the monitor starts.

        During the start, the address may still belong to the predecessor.
        """
        try:
            address = json.loads((self.state / "http.json").read_text())
        except FileNotFoundError:
            return Answer(0, "", {})
        return http_get(f"http://{address['host']}:{address['port']}{path}")

    def page(self, path: str) -> str:
        answer = self.get(path)
        return answer.text if answer.status == 200 else ""

    def refusal(self, path: str) -> str:
        """Return the reason that the monitor gives for an unavailable page, or an empty string."""
        answer = self.get(path)
        return (
            ""
            if answer.status == 200 or "no iteration of the loop has ended yet" in answer.text
            else answer.text
        )
