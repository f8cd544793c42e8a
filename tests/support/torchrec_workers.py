"""A group of TorchRec workers led by the test process.

Later tests reuse the other workers.
"""

import os
import socket
import subprocess
import sys
from unittest.mock import patch

from testing.paths import REPOSITORY

_FOLLOW = "from components.training.torchrec.engine import follow; follow()"


class Workers:
    """The test's TorchRec workers. Only one group of workers exists at a time."""

    def __init__(self):
        self._size, self._others, self._variables = 1, [], None

    def be(self, size):
        """Change the number of workers in the group to `size`."""
        if size == self._size:
            return
        self.end()
        if size == 1:
            return
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "WORLD_SIZE": f"{size}"}
        common |= {
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "LOCAL_WORLD_SIZE": f"{size}",
        }
        self._others = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", _FOLLOW],
                env={**os.environ, **common, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"},
                cwd=REPOSITORY,
            )
            for rank in range(1, size)
        ]
        self._size, self._variables = (
            size,
            patch.dict(os.environ, {**common, "RANK": "0", "LOCAL_RANK": "0"}),
        )
        self._variables.start()
        from torchrec.distributed import collective_utils

        from components.training.torchrec.tables import begin_group

        # TorchRec checks a new group only once in each process. New worker processes wait for the
        # check of all members, so the test process must check again.
        collective_utils._INITIALIZED = False
        assert begin_group(), "an earlier test left a process group"

    def end(self):
        """Stop all workers except the test process."""
        if self._size == 1:
            return
        from components.training.torchrec.engine import end_group

        try:
            end_group()
        finally:
            self._variables.stop()
            for each in self._others:
                each.wait(60)
            self._size, self._others = 1, []
