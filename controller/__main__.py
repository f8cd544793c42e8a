"""The release controller: looks after what is served between releases, with the right to change it.

`python -m controller --store S`. Each round the watchdog probes every Triton and heals what
answers wrongly (`controller.watchdog`), then the version that bakes is judged, and taken back where it is bad
(`controller.baking`). At the start and once a day the versions' files are compared with their hashes
(`controller.inspection`). A canary is grown by commands of its own (`deployment.canary`).
"""

import argparse
import json
import logging
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from controller.baking import Baking, BakingStep
from controller.inspection import Inspection
from controller.watchdog import FINDINGS, Watchdog
from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError
from evergreen.runtime.exit_codes import exits_with_code
from evergreen.runtime.flags import CommandParser
from evergreen.serving.servers import parse_urls
from evergreen.serving.site import add_site_flags, site_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_INTERVAL_SECONDS = 3600.0


@dataclass(kw_only=True)
class ReleaseController:
    """What one process does, round by round; `status` is written after each, so that its age tells a hanging loop."""

    watchdog: Watchdog
    baking: Baking
    inspection: Inspection
    status: Path | None = None
    """JSON file with the last round: findings by server, their counts, the baking version, files that were replaced,
    and why it failed; None = none."""

    def round(self) -> None:
        """Probe, heal, judge and inspect; a part that fails is logged, and the others go on."""
        problems: list[str] = []
        findings = self._try(self.watchdog.look, problems) or {}
        baked = self._try(partial(self.baking.step, self.watchdog.reloads), problems)
        self._try(self.inspection.step, problems)
        if self.status is not None:
            self._write_status(self.status, findings, baked=baked, problem="; ".join(dict.fromkeys(problems)) or None)

    def _try(self, part: Callable[[], T], problems: list[str]) -> T | None:
        try:
            return part()
        except (ContractError, PermanentError, TemporaryError, OSError) as error:
            problems.append(str(error))
            logger.error("this round failed: %s", error)
            return None

    def _write_status(
        self, path: Path, findings: dict[str, str], *, baked: BakingStep | None, problem: str | None
    ) -> None:
        document: dict[str, Any] = {
            "servers": findings,
            "counts": {finding: self.watchdog.counts[finding] for finding in FINDINGS},
            "recovered": self.watchdog.num_recovered,
            "baking": asdict(baked) if baked else None,
            "healed_files": self.inspection.healed,
            "problem": problem,
        }
        try:
            write_whole(path, json.dumps(document) + "\n")
        except OSError as error:
            logger.error("the status cannot be written: %s", error)


def control(controller: ReleaseController, interval_seconds: float, wait: Callable[[float], bool]) -> None:
    """Rounds until `wait(seconds)`, called with the seconds from one round's end to the next, returns True."""
    while True:
        controller.round()
        if wait(interval_seconds):
            return


def build_parser() -> argparse.ArgumentParser:
    """The controller's flags."""
    parser = CommandParser(prog="evergreen controller", description=__doc__)
    add_site_flags(parser)
    parser.add_argument(
        "--metrics-urls",
        default="",
        help="host:metrics_port or dns:///name:metrics_port of every server; default: their counters take nothing back",
    )
    parser.add_argument("--interval-seconds", type=float, default=5.0, help="between rounds")
    parser.add_argument("--status", type=Path, help="JSON file for the last round's findings or failure, and counts")
    return parser


@exits_with_code
def main(argv: list[str] | None = None) -> int:
    """Looks after the site until SIGTERM or Ctrl-C."""
    arguments = build_parser().parse_args(argv)
    if not 0 < arguments.interval_seconds <= MAX_INTERVAL_SECONDS:
        raise ContractError(
            f"interval is {arguments.interval_seconds} s, expected more than 0 and at most {MAX_INTERVAL_SECONDS:g}"
        )
    site = site_of(arguments)
    if not site.triton_urls:
        raise ContractError("triton urls are none, expected at least one")
    # The event ends the wait between rounds, never a call: a cancelled call can crash Triton 2.51.
    stop = threading.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: stop.set())
    baking = Baking(site=site, metrics=parse_urls(arguments.metrics_urls))
    control(
        ReleaseController(
            watchdog=Watchdog(site=site), baking=baking, inspection=Inspection(site=site), status=arguments.status
        ),
        arguments.interval_seconds,
        stop.wait,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
