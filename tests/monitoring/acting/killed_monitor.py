"""A monitor over a KFP double in a process of its own, which kills itself with SIGKILL at the named checkpoint.

Arguments: JSON with `folder`, `changes` (settings), `time`, `point`. Exit code 0 = the point was never reached.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from components.storage.folder import FolderObjects
from monitoring.acting.kubeflow_trigger import KubeflowTrigger
from monitoring.acting.leadership import Leadership, replica_name
from monitoring.acting.ledger import Ledger
from monitoring.memory.store import Store
from monitoring.monitor import Monitor
from tests.monitoring.conftest import Bench


def start_leading(b: Bench) -> Monitor:
    """A monitor as `python -m monitoring` makes it, with the bench's clock and checkpoint."""
    b.kill()
    b.store = Store(b.settings.state / "monitor.db")
    leases = FolderObjects(b.folder / "leases")
    leadership = Leadership(leases, replica=replica_name(b.settings.state), seconds=600.0)
    leadership.take()
    b.monitor = Monitor(
        b.settings,
        subscriber=b.log,
        store=b.store,
        trigger=KubeflowTrigger.connect(b.settings, timeout_seconds=(5.0, 5.0)),
        ledger=Ledger(b.store, leases, term=leadership.term),
        guard=leadership.check,
        clock=b.clock,
        checkpoint=lambda name: b.checkpoint(name),
    )
    return b.monitor


def main(argument: str) -> None:
    given = json.loads(argument)

    def kill(name: str) -> None:
        if name == given["point"]:
            os.kill(os.getpid(), signal.SIGKILL)

    b = Bench(Path(given["folder"]), **given["changes"])
    b.clock.time, b.checkpoint = given["time"], kill
    monitor = start_leading(b)
    for _ in range(10):
        monitor.tick()
        b.clock.time += 16.0


if __name__ == "__main__":
    main(sys.argv[1])
