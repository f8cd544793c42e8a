"""The monitor as a process: `python -m monitoring --log sqlite:///... --state DIR --archive DIR --store DIR`.

Reads the settings (flags, else `EVERGREEN_MONITOR_*`), opens what the loop needs, runs it until SIGTERM or SIGINT.
What the loop does is `monitoring.monitor`'s.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from components.runtime.errors import ContractError, PermanentError, TemporaryError
from monitoring.backtest.settings import judging_of, write_judging
from monitoring.json_logs import configure_logging
from monitoring.settings import MonitorSettings, build_parser, read_settings

if TYPE_CHECKING:
    from components.logs.event_log import Subscriber
    from monitoring.acting.standby import Claim
    from monitoring.showing.exposition import Exposition

logger = logging.getLogger(__name__)

MAX_RETRY_SECONDS = 30.0


def main(argv: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    """Runs the monitor; 0 stopped on request, 1 it could not go on, 2 misuse."""
    parser = build_parser(MonitorSettings, prog="python -m monitoring", description=(__doc__ or "").split("\n")[0])
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        settings = read_settings(MonitorSettings, parser, argv, environment)
        configure_logging(settings.log_format)
        run(settings, stop)
    except ContractError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (PermanentError, TemporaryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def run(settings: MonitorSettings, stop: threading.Event) -> None:
    """Runs the monitor until `stop` is set: stands by while another replica leads, else watches the log."""
    from monitoring.acting.leadership import NotLeading
    from monitoring.acting.standby import leading, open_leadership
    from monitoring.showing.exposition import Exposition
    from monitoring.showing.history import read_history
    from monitoring.showing.page import status_page
    from monitoring.showing.run_reports import read_report
    from monitoring.showing.server import Server

    exposition = Exposition()

    def page() -> str:
        return status_page(exposition, read_history(settings.state, settings.store), now=time.time())

    leadership = open_leadership(settings, state=settings.state, model_store=settings.store)
    server = Server(
        exposition,
        host=settings.http_host,
        port=settings.http_port,
        page=page,
        report=lambda path: read_report(settings.store, path),
    )
    try:
        while not stop.is_set():
            with leading(
                leadership,
                state=settings.state,
                stop=stop,
                pause_seconds=settings.tick_seconds,
                tell=lambda reason: _stand_by(exposition, reason),
                own=lambda: server.write_address(settings.state),
            ) as claim:
                try:
                    if claim is not None:
                        _lead(settings, claim, exposition, stop)
                except NotLeading as error:
                    logger.warning("this replica leads no more, it stands by: %s", error)
    except BaseException as error:
        exposition.end(f"{type(error).__name__}: {error}")
        raise
    finally:
        server.close()


def _lead(settings: MonitorSettings, claim: Claim, exposition: Exposition, stop: threading.Event) -> None:
    """Watches the log until `stop` is set, then takes in and archives what is there.

    A log that is busy or away is tried again, at longer and longer pauses; any other failure ends the process, so
    that whoever supervises it sees it.

    Raises:
        NotLeading: another replica leads now.
    """
    from components.logs.locations import open_subscriber
    from monitoring.acting.leadership import NotLeading
    from monitoring.acting.triggers import make_trigger
    from monitoring.monitor import Monitor

    write_judging(settings.state, judging_of(settings))
    subscriber = _open_patiently(lambda: open_subscriber(settings.log), settings.tick_seconds, claim, exposition, stop)
    if subscriber is None:
        return
    with closing(subscriber):
        monitor = Monitor(
            settings,
            subscriber=subscriber,
            store=claim.store,
            trigger=make_trigger(settings),
            ledger=claim.ledger,
            guard=claim.guard,
            exposition=exposition,
        )
        pause = settings.tick_seconds
        while not stop.wait(pause):
            claim.expect_leading()
            try:
                monitor.tick()
                pause = settings.tick_seconds
            except NotLeading:
                raise
            except TemporaryError as error:
                pause = min(max(2 * pause, settings.tick_seconds), MAX_RETRY_SECONDS)
                exposition.stumble(str(error))
                logger.warning("turn cut short, next in %g s: %s", pause, error)
        monitor.stop()


def _open_patiently(
    open_log: Callable[[], Subscriber], pause: float, claim: Claim, exposition: Exposition, stop: threading.Event
) -> Subscriber | None:
    """The log as soon as it can be opened, tried at longer and longer pauses; None where `stop` came first.

    Nothing is gained by ending: a supervisor would start the process again, at pauses of its own.

    Raises:
        NotLeading: another replica leads now.
    """
    while not stop.is_set():
        try:
            return open_log()
        except TemporaryError as error:
            exposition.stumble(str(error))
            logger.warning("the log cannot be opened, next try in %g s: %s", pause, error)
        stop.wait(pause)
        claim.expect_leading()
        pause = min(2 * pause, MAX_RETRY_SECONDS)
    return None


def _stand_by(exposition: Exposition, reason: str) -> None:
    from monitoring.showing.snapshot import STANDBY, Snapshot

    if exposition.snapshot.role != STANDBY:
        logger.info("standing by: %s", reason)
    exposition.beat(Snapshot(time=time.time(), role=STANDBY, decision=f"standing by: {reason}"))


if __name__ == "__main__":
    sys.exit(main())
