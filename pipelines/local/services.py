"""The command lines of the demo's processes: each room's own flags, filled from the demo's plan.

Starting and watching them is `pipelines.local.stack`'s.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from pipelines.local.demo_plan import DemoPlan, DemoSettings
from pipelines.local.log_server import LogPlace, sqlite_log
from pipelines.local.run import LocalFolders

POLICIES = ("threshold", "sequential", "data_drift")
"""The monitor's, in order: the first that is sure gives a run its reason."""
BACKTESTED = ("threshold", "sequential", "relative_drop")


@dataclass(frozen=True, kw_only=True)
class Services:
    """Where the demo's processes meet, and how each is called."""

    settings: DemoSettings
    plan: DemoPlan
    folders: LocalFolders
    triton_url: str
    log: LogPlace | None = None
    """The record log; None = a SQLite file in the demo's folder."""

    @property
    def package(self) -> Path:
        """The compiled pipeline."""
        return self.folders.root / "retraining.yaml"

    @property
    def archive(self) -> Path:
        """Where the monitor archives and the uploader takes from."""
        return self.folders.root / "archive"

    @property
    def monitor_state(self) -> Path:
        """The monitor's memory, timeline and events."""
        return self.folders.root / "monitor"

    @property
    def incident(self) -> Path:
        """The monitor's records and decisions, to be replayed anywhere."""
        return self.folders.root / "incident"

    @property
    def log_url(self) -> str:
        """The click log."""
        return (self.log or sqlite_log(self.folders.root)).url

    @property
    def log_variables(self) -> dict[str, str]:
        """What the click log's users need in their environment."""
        return self.log.variables if self.log else {}

    def run_command(self) -> list[str]:
        """Runs the pipeline here; the monitor adds `--request`."""
        command = [sys.executable, "-m", "pipelines", "run", "--package", str(self.package)]
        command += ["--folder", str(self.folders.root)]
        parameters = {"triton_urls": self.triton_url, **self.plan.parameters}
        for name, value in parameters.items():
            command += ["-p", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
        return command

    def first_run_command(self) -> list[str]:
        """Runs the pipeline for the first model.

        Nothing is live yet: a model whose gate is undecided for lack of rows still beats none, and the verdict says so.
        """
        parameters = ("trigger_id=first", "trigger_reason=first model", "accept_inconclusive=true")
        return [*self.run_command(), *(word for parameter in parameters for word in ("-p", parameter))]

    def uploader_command(self) -> list[str]:
        """Moves archived files into the lake."""
        flags = {"archive": self.archive, "lake": self.folders.lake, "interval-seconds": 0.5}
        return _command("monitoring.uploader", flags)

    def _judging(self, threshold: float) -> dict[str, object]:
        """How rows are judged: the monitor's flags, and the backtest's."""
        plan = self.plan
        return {
            "window-rows": plan.window_rows,
            "auc-threshold": round(threshold, 4),
            "min-clicks": plan.min_clicks,
            "min-rows-since-breach": plan.min_rows_since_breach,
            "cooldown-seconds": 3600,
            "daily-budget": 2,
            "attribution-window-seconds": plan.attribution_window_seconds,
            "decide-seconds": 0.5,
        }

    def monitor_command(self, threshold: float) -> list[str]:
        """Watches the log; asks for a run when the AUC falls below `threshold`, tells of features that drift."""
        plan = self.plan
        flags = {
            "log": self.log_url,
            "state": self.monitor_state,
            "archive": self.archive,
            "store": self.folders.store,
            "http-port": 0,
            **self._judging(threshold),
            "policies": ",".join(POLICIES),
            "actions": "data_drift=notify",
            "drift-bucket-seconds": plan.drift_bucket_seconds,
            "drift-grace-seconds": plan.drift_grace_seconds,
            "drift-min-rows": plan.drift_min_rows,
            "archive-roll-rows": plan.archive_roll_rows,
            "archive-roll-seconds": 10,
            "tick-seconds": 0.5,
            "trigger": "local",
            "run-command": shlex.join(self.run_command()),
        }
        return _command("monitoring", flags)

    def rollback_command(self, reason: str) -> list[str]:
        """Makes the version before the live one live again; `--to` names another."""
        folders = self.folders
        flags: dict[str, object] = {
            "store": folders.store,
            "repository": folders.repository,
            "triton-urls": self.triton_url,
            "reason": reason,
        }
        return _command("components.deployment.rollback", flags)

    def verify_command(self, version: int) -> list[str]:
        """Recomputes what a version answered; its findings as JSON."""
        flags: dict[str, object] = {"store": self.folders.store, "lake": self.folders.lake}
        return _command("components.deployment.verify", flags, str(version), "--json")

    def incident_command(self) -> list[str]:
        """Copies all that the monitor decided, and the lake's rows that it decided over, into a folder."""
        flags: dict[str, object] = {
            "state": self.monitor_state,
            "archive": self.folders.lake,
            "store": self.folders.store,
            "out": self.incident,
        }
        return _command("monitoring.backtest.incident_command", flags, "record")

    def decide_again_command(self) -> list[str]:
        """Replays that incident; what it found as JSON."""
        return _command("monitoring.backtest.incident_command", {}, "replay", str(self.incident), "--json")

    def backtest_command(self, threshold: float, drift_time: float | None) -> list[str]:
        """What single policies would have done over the lake's rows, as JSON."""
        # Features take the longest to read, and none of these policies looks at them.
        flags = {**self._judging(threshold), "store": self.folders.store, "drift-bucket-seconds": 0}
        if drift_time is not None:
            flags["drift-at"] = drift_time
        policies = (word for name in BACKTESTED for word in ("--policy", name))
        return _command("monitoring.backtest", flags, str(self.folders.lake), "--json", *policies)

    def replay_command(self) -> list[str]:
        """Sends traffic and logs it; obeys lines on its standard input."""
        plan, root = self.plan, self.folders.root
        flags: dict[str, object] = (
            {"world": root / "world.json", "drifted-world": root / "drifted_world.json"}
            if self.settings.data is None
            else {"data": root / "replay.parquet", "drift-columns": ",".join(plan.drift_columns)}
        )
        flags |= {
            "server": self.triton_url,
            "log": self.log_url,
            "rate": plan.rate,
            "rows-per-request": plan.rows_per_request,
            "label-delay-seconds": plan.label_delay_seconds,
            "seed": self.settings.seed + 1,
            "stats": root / "traffic.jsonl",
            "summary": root / "traffic_summary.json",
        }
        return _command("inference_client", flags, "replay")


def _command(module: str, flags: dict[str, object], *words: str) -> list[str]:
    pairs = (word for name, value in flags.items() for word in (f"--{name}", str(value)))
    return [sys.executable, "-m", module, *words, *pairs]
