"""Tests of SIGTERM during training.

Outside of a fit, the step ends at once. During a fit, the signal only requests the fit to stop.
"""

import signal
import threading

from components.training.preemption import stop_on_sigterm
from evergreen.runtime.errors import Preempted
from tests.support.errors import raises


def test_sigterm_outside_fit_ends_step_at_once():
    with (
        raises(Preempted, "SIGTERM", "no fit"),
        stop_on_sigterm(),
    ):
        signal.raise_signal(signal.SIGTERM)


def test_second_sigterm_does_not_disturb_end_that_first_began():
    done = []
    with raises(Preempted, "no fit"), stop_on_sigterm():  # noqa: PT012
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            done.append("cleaned up")
    assert done == ["cleaned up"]


def test_handler_of_before_is_back_afterwards_and_threads_do_without():
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_sigterm():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    looked = []

    def work():
        with stop_on_sigterm() as request:
            looked.append(request())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert looked == [False]
