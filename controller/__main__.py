"""Run the release controller, which supervises the served version between releases.

`python -m controller --store S`. In each round the watchdog probes every
Triton server and reloads models that answer wrongly (`controller.watchdog`). Then the baking
version is evaluated, and rolled back if it is bad (`controller.baking`). At the start and once a
day the versions' files are compared with their hashes (`controller.inspection`). Canaries are
advanced by separate commands (`controller.canary`).
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
    """One controller process that repeats its checks in rounds.

    The file `status` is written after each round, so a file that is not updated shows a hanging
    process.
    """

    watchdog: Watchdog
    baking: Baking
    inspection: Inspection
    status: Path | None = None
    """JSON file about the last round: findings by server, number of each finding, the baking
    version, replaced files, and errors. None = no file is written."""

    def round(self) -> None:
        """Probe the servers, repair them, evaluate the baking version and inspect the files.

        If one of these steps fails, its error is logged and the other steps run.
        """
        problems: list[str] = []
        findings = self._try(self.watchdog.look, problems) or {}
        baked = self._try(partial(self.baking.step, self.watchdog.reloads), problems)
        self._try(self.inspection.step, problems)
        if self.status is not None:
            self._write_status(
                self.status,
                findings,
                baked=baked,
                problem="; ".join(dict.fromkeys(problems)) or None,
            )

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


def control(
    controller: ReleaseController, interval_seconds: float, wait: Callable[[float], bool]
) -> None:
    """Run rounds until `wait` returns True.

    `wait` is called with the seconds between two rounds.
    """
    while True:
        controller.round()
        if wait(interval_seconds):
            return


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command."""
    parser = CommandParser(prog="evergreen release controller", description=__doc__)
    add_site_flags(parser)
    parser.add_argument(
        "--metrics-urls",
        default="",
        help="host:metrics_port or dns:///name:metrics_port of every server; default: counters are "
        "not evaluated",
    )
    parser.add_argument(
        "--interval-seconds", type=float, default=5.0, help="seconds between two rounds"
    )
    parser.add_argument(
        "--status", type=Path, help="JSON file for the last round's findings, counts and errors"
    )
    return parser


@exits_with_code
def main(argv: list[str] | None = None) -> int:
    """Run the controller until SIGTERM or Ctrl-C."""
    arguments = build_parser().parse_args(argv)
    if not 0 < arguments.interval_seconds <= MAX_INTERVAL_SECONDS:
        raise ContractError(
            f"interval is {arguments.interval_seconds} s, expected more than 0 and at most "
            f"{MAX_INTERVAL_SECONDS:g}"
        )
    site = site_of(arguments)
    if not site.triton_urls:
        raise ContractError("--triton-urls is empty, expected at least one server")
    # The event interrupts only the wait between rounds and never a gRPC call, because a cancelled
    # call can crash Triton 2.51.
    stop = threading.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: stop.set())
    baking = Baking(site=site, metrics=parse_urls(arguments.metrics_urls))
    control(
        ReleaseController(
            watchdog=Watchdog(site=site),
            baking=baking,
            inspection=Inspection(site=site),
            status=arguments.status,
        ),
        arguments.interval_seconds,
        stop.wait,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
