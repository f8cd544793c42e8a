"""Run the steps of a canary until the canary has ended, like the rounds of a controller."""

from controller.canary.steps import ENDED, NONE, step
from evergreen.runtime.errors import TemporaryError


def watch(settings, *, interval_seconds, sleep, report=lambda _: None):
    """Call `step` until no canary is left, and return the result of the last step."""
    while True:
        try:
            done = step(settings)
        except TemporaryError:
            sleep(interval_seconds)
            continue
        report(done)
        if done.action in (NONE, ENDED):
            return done
        sleep(interval_seconds if done.wait_seconds is None else done.wait_seconds)
