"""The demo's proofs, once everything has stopped: every logged score recomputed, every decision made again.

By the commands that a person would type, side by side. What their findings say is `release_numbers`' and
`decision_numbers`' to tell.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from components.runtime.errors import PermanentError
from pipelines.local.observations import last_word, printed_json

if TYPE_CHECKING:
    from pipelines.local.demo import Demo

PROOF_SECONDS = 600.0


def verify_scores(demo: Demo) -> list[dict[str, Any]]:
    """What `evergreen verify` finds of each version that answered."""
    versions = sorted({int(version) for line in demo.traffic.lines for version in line["versions"]})
    for version in versions:
        demo.stack.start(f"verify_{version}", demo.services.verify_command(version))
    return [json.loads(last_word(_ended(demo, f"verify_{version}", (0, 1)))) for version in versions]


def replay_decisions(demo: Demo) -> dict[str, Any] | None:
    """What `evergreen replay` finds of an incident over the whole demo; None where nothing was decided.

    `points` decided again from the lake's rows, whether all are `equal` to what the monitor wrote, and their `digest`.
    """
    decisions = demo.services.monitor_state / "decisions.jsonl"
    if not decisions.exists():
        return None
    demo.stack.start("incident", demo.services.incident_command())
    _ended(demo, "incident", (0,))
    demo.stack.start("decide_again", demo.services.decide_again_command())
    found = printed_json(_ended(demo, "decide_again", (0, 1)))
    return {"points": found["points"], "equal": found["first_difference"] is None, "digest": found["digest"]}


def backtest_policies(demo: Demo, drift_time: float | None) -> list[dict[str, Any]]:
    """What `evergreen backtest` says of single policies over the demo's rows."""
    demo.stack.start("backtest", demo.services.backtest_command(demo.threshold, drift_time))
    found: list[dict[str, Any]] = printed_json(_ended(demo, "backtest", (0,)))
    return found


def _ended(demo: Demo, name: str, good: tuple[int, ...]) -> Any:
    """The log of a process that ended well."""
    log = demo.folders.logs / f"{name}.log"
    code = demo.stack.wait_for_exit(name, seconds=PROOF_SECONDS)
    if code not in good:
        raise PermanentError(f"{name} ended with code {code}: {last_word(log)}")
    return log
