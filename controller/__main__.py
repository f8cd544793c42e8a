"""Run the release controller, the only process that changes what is served.

`python -m controller --store S`. The controller holds the lock of Triton's model repository while
it runs. In each round, the controller carries out the open requests of the journal
(`controller.reconcile`), and undoes an interrupted change. After the requests, the watchdog probes
every Triton server and reloads models that answer wrongly (`controller.watchdog`). The baking
version is evaluated, and rolled back if it is bad (`controller.baking`). The canary is evaluated,
and grows or ends (`controller.canary.steps`). At the start and once a day, a separate thread
compares the versions' files with their hashes (`controller.inspection`). The controller looks for
new requests after each part of a round, and between two rounds. A rollback therefore waits for at
most one part.

A second controller waits until it gets the lock.
"""

import argparse
import json
import logging
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from controller.baking import Baking, BakingStep
from controller.canary import steps
from controller.canary.rules import add_evidence_flags, policy_of
from controller.canary.steps import CanarySettings
from controller.deployment_target import TargetSettings, add_target_flags, target_of
from controller.inspection import Inspection
from controller.reconcile import reconciled
from controller.watchdog import FINDINGS, Watchdog
from evergreen.registry.recommenders import served_name
from evergreen.registry.requests import open_requests
from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import ContractError, PermanentError, Refused, TemporaryError
from evergreen.runtime.exit_codes import exits_with_code
from evergreen.runtime.flags import CommandParser
from evergreen.serving.repository.model_repository import ModelRepository
from evergreen.serving.servers import parse_urls
from evergreen.storage.uris import open_objects

logger = logging.getLogger(__name__)

T = TypeVar("T")

AUTHOR = "controller"
"""Author of the controller's own changes in the journal, such as automatic rollbacks."""
MAX_INTERVAL_SECONDS = 3600.0
POLL_SECONDS = 0.1
"""Seconds between two checks of the journal for new requests."""
CANARY_SECONDS = 30.0
"""Seconds between two evaluations of a canary."""


@dataclass(kw_only=True)
class ReleaseController:
    """One controller process that repeats its checks in rounds.

    The file `status` is written after each round. If the file is not updated, the process hangs.
    """

    watchdog: Watchdog
    baking: Baking
    inspection: Inspection
    canary: CanarySettings | None = None
    """Evidence and rules of canaries. If None, canaries are not evaluated."""
    status: Path | None = None
    """JSON file with the results of the last round. It contains the findings and their counts, the
    last canary step, replaced files, and errors. It also names the version whose baking has not
    ended. None = the status is not written to a file."""
    num_recovered: int = 0
    """Number of interrupted changes that were undone."""
    _canary_step: steps.Step | None = None
    _canary_due: float = 0.0

    @property
    def target(self) -> TargetSettings:
        """Deployment target."""
        return self.watchdog.target

    def round(self) -> None:
        """Carry out requests, probe and repair the servers, and evaluate versions and files.

        If one of these steps fails, its error is logged and the other steps run.
        """
        problems: list[str] = []
        self._try(self.reconcile, problems)
        findings = self._try(self.watchdog.check, problems) or {}
        self.answer()
        baked = self._try(partial(self.baking.step, self.watchdog.reloads), problems)
        self.answer()
        self._try(self._step_canary, problems)
        self.answer()
        self._try(self.inspection.step, problems)
        self.write_status(findings, baked=baked, problem="; ".join(dict.fromkeys(problems)) or None)

    def reconcile(self) -> None:
        """Undo an interrupted change, and carry out the open requests.

        Raises:
            ContractError, TemporaryError, PermanentError, OSError: as in `reconcile.drive`.
        """
        timeouts = replace(self.target.timeouts, lock_seconds=0.0)
        with reconciled(replace(self.target, timeouts=timeouts)) as done:
            self.num_recovered += done.recovered is not None

    def answer(self) -> None:
        """Carry out the open requests, if there are any. An error is logged."""
        if self._try(lambda: open_requests(self.target.store), []):
            self._try(self.reconcile, [])

    def _step_canary(self) -> None:
        now = self.target.timeouts.clock()
        if self.canary is None or now < self._canary_due:
            return
        self._canary_due = now + CANARY_SECONDS
        done = self._canary_step = steps.step(self.canary)
        if done.wait_seconds is not None:
            self._canary_due = now + done.wait_seconds

    def _try(self, part: Callable[[], T], problems: list[str]) -> T | None:
        try:
            return part()
        except (ContractError, PermanentError, TemporaryError, Refused, OSError) as error:
            problems.append(str(error))
            logger.error("this round failed: %s", error)
            return None

    def write_status(
        self,
        findings: dict[str, str],
        *,
        baked: BakingStep | None = None,
        problem: str | None = None,
    ) -> None:
        """Write the status file, if there is one."""
        if self.status is None:
            return
        step = self._canary_step
        document: dict[str, Any] = {
            "servers": findings,
            "counts": {finding: self.watchdog.counts[finding] for finding in FINDINGS},
            "recovered": self.num_recovered,
            "baking": asdict(baked) if baked else None,
            "canary": None if step is None else {"action": step.action, "reason": step.reason},
            "healed_files": self.inspection.healed,
            "problem": problem,
        }
        try:
            write_whole(self.status, json.dumps(document) + "\n")
        except OSError as error:
            logger.error("the status cannot be written: %s", error)


def control(
    controller: ReleaseController,
    interval_seconds: float,
    wait: Callable[[float], bool],
    *,
    check_held: Callable[[], None] = lambda: None,
) -> None:
    """Run rounds until `wait` returns True.

    `wait` gets the seconds until the next round. `wait` is called several times per round, because
    new requests are carried out between two calls.

    Raises:
        TemporaryError: `check_held` found before a round that the lock was lost.
    """
    while True:
        check_held()
        controller.round()
        left = interval_seconds
        while left > 0:
            if wait(min(POLL_SECONDS, left)):
                return
            left -= POLL_SECONDS
            controller.answer()


@dataclass(kw_only=True)
class LockHolder:
    """Class that waits for the repository's lock, and holds the lock while a controller runs."""

    target: TargetSettings
    make: Callable[[TargetSettings], ReleaseController]
    interval_seconds: float
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Run the controller until the event `stop` is set.

        If the lock is lost, wait for it again.
        """
        reported = ""
        while not self.stop.is_set():
            problem: str | None = None
            try:
                # Without a recommender, there is nothing to serve.
                if self.target.recommender or served_name(self.target.store):
                    repository = self.target.open_repository()
                    with repository.locked():
                        self._run_with(repository)
            except (ContractError, TemporaryError, PermanentError, OSError) as error:
                problem = str(error)
                if problem != reported:
                    logger.error("waiting: %s", problem)
            reported = problem or ""
            self.make(self.target).write_status({}, problem=problem)
            self.stop.wait(min(1.0, self.interval_seconds))

    def _run_with(self, repository: ModelRepository) -> None:
        """Run rounds while the lock is held.

        Raises:
            TemporaryError: the lock was lost.
        """
        controller = self.make(replace(self.target, held=repository))
        control(controller, self.interval_seconds, self.stop.wait, check_held=repository.check_held)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command."""
    parser = CommandParser(prog="evergreen release controller", description=__doc__)
    add_target_flags(parser, author=AUTHOR)
    parser.add_argument(
        "--metrics-urls",
        default="",
        help="host:metrics_port or dns:///name:metrics_port of every server; default: counters are "
        "not evaluated",
    )
    parser.add_argument(
        "--interval-seconds", type=float, default=5.0, help="seconds between two rounds"
    )
    add_evidence_flags(parser)
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
    target = target_of(arguments)
    # The event interrupts only the wait between rounds and never a gRPC call, because a cancelled
    # call can crash Triton 2.51.
    stop = threading.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: stop.set())
    metrics, policy = parse_urls(arguments.metrics_urls), policy_of(arguments)
    evidence = tuple(open_objects(uri) for uri in (arguments.archive, arguments.lake) if uri)

    def make(held: TargetSettings) -> ReleaseController:
        canary = CanarySettings(target=held, evidence=evidence, metrics=metrics, policy=policy)
        return ReleaseController(
            watchdog=Watchdog(target=canary.staged_target),
            baking=Baking(target=canary.staged_target, metrics=metrics),
            inspection=Inspection(target=canary.staged_target),
            canary=canary,
            status=arguments.status,
        )

    LockHolder(
        target=target, make=make, interval_seconds=arguments.interval_seconds, stop=stop
    ).run()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
