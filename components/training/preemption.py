"""SIGTERM while a model is trained: whoever runs the step wants it to end, and to be begun again later.

Kubernetes sends it before it takes a node away and kills 30 seconds later. A fit that is under way is asked to save
first; anything else ends at once, since it is whole or absent. The exit code is `runtime.errors`'.

On Kubeflow a retry does not depend on the code (Argo repeats whatever failed), nor may the save be relied on: by its
source, KFP's launcher, which stands between Kubernetes and the step, does not handle SIGTERM, and the container ends
with it. The saves every `checkpoint_minutes` are what such a retry finds.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from evergreen.runtime.errors import Preempted


class StopRequest:
    """Whether SIGTERM came, and what it does now."""

    def __init__(self) -> None:
        self.came = False
        self._deferred = False

    def __call__(self) -> bool:
        """Whether the work should end at its next whole state."""
        return self.came

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Lets the body look at the request itself, and save what it has, instead of ending it where it stands."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        if self.came:
            raise Preempted("SIGTERM came while the fit ended; it is saved whole")

    def arrive(self, signum: int, _frame: Any) -> None:
        """The signal's handler; a second one changes nothing, least of all what the first one's end still writes."""
        is_first, self.came = not self.came, True
        if is_first and not self._deferred:
            raise Preempted(f"{signal.Signals(signum).name} came while no fit was under way")


@contextmanager
def stop_on_sigterm() -> Iterator[StopRequest]:
    """Turns SIGTERM into a request to stop, within the body; only a process's main thread gets signals."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = signal.signal(signal.SIGTERM, request.arrive)
    try:
        yield request
    finally:
        signal.signal(signal.SIGTERM, before)
