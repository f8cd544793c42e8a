"""A monitor over a KFP server in a process of its own, which kills itself with SIGKILL at the named checkpoint.

Arguments: JSON with `folder`, `changes` (settings), `time`, `point`. Exit code 0 = the point was never reached.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from monitoring.acting.kubeflow_trigger import KubeflowTrigger
from monitoring.monitor import Monitor
from tests.support.monitors import Bench


def start_on_kubeflow(b: Bench) -> Monitor:
    b.trigger = KubeflowTrigger(b.settings.acting.kubeflow, store=b.settings.store, timeout_seconds=(5.0, 5.0))
    return b.start()


def main(argument: str) -> None:
    given = json.loads(argument)

    def kill(name: str) -> None:
        if name == given["point"]:
            os.kill(os.getpid(), signal.SIGKILL)

    b = Bench(Path(given["folder"]), **given["changes"])
    b.clock.now, b.checkpoint = given["time"], kill
    monitor = start_on_kubeflow(b)
    for _ in range(10):
        monitor.tick()
        b.clock.now += 16.0


if __name__ == "__main__":
    main(sys.argv[1])
