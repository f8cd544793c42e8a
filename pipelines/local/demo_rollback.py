"""The demo's walk back: the newest version is rolled back while traffic flows, seen to be gone, and made live again.

By the command that a person on call would type. What it took is `release_numbers`' to say.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from components.runtime.errors import PermanentError
from components.store import promotion_journal
from pipelines.local.observations import last_word

if TYPE_CHECKING:
    from pipelines.local.demo import Demo

ANSWER_SECONDS = 30.0


def show_rollback(demo: Demo) -> list[dict[str, Any]]:
    """Rolls back to the version before, then forward; what each walk was, or none where no traffic flows any more."""
    live = promotion_journal.current(demo.folders.store)
    if live is None or live.previous_version is None or demo.rows_ran_out():
        return []
    ways: tuple[tuple[int, str, list[str]], ...] = (
        (live.previous_version, "the demo shows a rollback", []),
        (live.version, "the demo goes back to the newest version", ["--to", str(live.version)]),
    )
    return [_walk(demo, version, reason, words) for version, reason, words in ways]


def _walk(demo: Demo, version: int, reason: str, words: list[str]) -> dict[str, Any]:
    """Makes `version` live by the rollback command, and waits until it alone answers; times are since the epoch."""
    name = f"rollback_to_{version}"
    started, started_at = time.monotonic(), time.time()
    process = demo.stack.start(name, [*demo.services.rollback_command(reason), *words], may_end=True)
    demo.stack.wait_until(
        lambda: process.poll() is not None, what=f"the end of {name}", seconds=120, watch=demo.watch, every=0.05
    )
    ended_at = started_at + time.monotonic() - started
    code = demo.stack.wait_for_exit(name, seconds=5)
    now = promotion_journal.current(demo.folders.store)
    if code or now is None or now.version != version:
        raise PermanentError(f"{name} ended with code {code}: {last_word(demo.folders.logs / f'{name}.log')}")
    demo.screen.say(f"  version {version} is live after {ended_at - started_at:.1f} s")
    demo.stack.wait_until(
        lambda: demo.answered_since(ended_at, version) is not None or demo.rows_ran_out(),
        what=f"an answer from version {version}",
        seconds=ANSWER_SECONDS,
        watch=demo.watch,
    )
    return {
        "version": version,
        "started_at": started_at,
        "ended_at": ended_at,
        "answered_at": demo.answered_since(ended_at, version),
        "traffic_ended": demo.rows_ran_out(),
    }
