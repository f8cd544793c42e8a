"""Handle SIGTERM during training: save the fit and end, so that a later run can continue it.

Kubernetes sends SIGTERM before it drains a node, and kills the process 30 seconds later. A fit in
progress is saved first. Outside a fit, the process ends at once, because its output is complete or
absent. `evergreen.runtime.exit_codes` has the exit code. SIGUSR1 has the same effect. `mpirun` only
forwards SIGUSR1, but kills its processes less than a second after SIGTERM.

On Kubeflow, a retry does not depend on the exit code, because Argo retries after every failure. On
Kubeflow, the save may also be cut short. KFP's launcher is the container's main process, and the
step is its child. The launcher's source code does not handle SIGTERM. SIGTERM therefore ends the
launcher and the container, possibly before the save is complete. A retry then continues from the
last regular save (`checkpoint_minutes`).
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from evergreen.runtime.errors import Preempted


class StopRequest:
    """Records whether SIGTERM arrived, and decides how the process reacts."""

    def __init__(self) -> None:
        self.came = False
        self._deferred = False

    def __call__(self) -> bool:
        """Return whether the work should save and end at the next opportunity."""
        return self.came

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer SIGTERM while the `with` body runs.

        The code in the body can then check for the request and save its work.
        """
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        if self.came:
            raise Preempted("SIGTERM arrived when the fit had ended; the fit is saved")

    def arrive(self, signum: int, _frame: Any) -> None:
        """Handle the signal. A second signal has no effect and does not interrupt the save."""
        is_first, self.came = not self.came, True
        if is_first and not self._deferred:
            raise Preempted(f"{signal.Signals(signum).name} arrived while no fit was running")


@contextmanager
def stop_on_sigterm() -> Iterator[StopRequest]:
    """Yield a stop request, and set it if SIGTERM or SIGUSR1 arrives while the body runs.

    Only the main thread of a process receives signals. In another thread, the context manager does
    nothing.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    signals = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.signal(number, request.arrive) for number in signals]
    try:
        yield request
    finally:
        for number, handler in zip(signals, before):
            signal.signal(number, handler)
