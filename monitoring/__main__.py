"""Run the monitor: `python -m monitoring --log URL --state DIR --archive DIR --store DIR`.

This module reads the settings (flags, else `EVERGREEN_MONITOR_*`) and the rules of the registry's
recommender. The module opens the log and the state, and runs `monitoring.monitor` until SIGTERM or
SIGINT.
"""

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from evergreen.config import reader
from evergreen.config.reader import read_settings
from evergreen.contracts.manifests import CURRENT
from evergreen.registry.recommenders import accepted, logged_recommender
from evergreen.runtime.errors import TemporaryError
from evergreen.runtime.exit_codes import ExitCode, exits_with_code
from evergreen.runtime.plain_text import configure_logging
from monitoring.settings import ENVIRONMENT_PREFIX, InstallationSettings, with_rules
from monitoring.state.rules_file import write_rules

if TYPE_CHECKING:
    from evergreen.events.event_log import Subscriber
    from monitoring.state.store import StateStore
    from monitoring.web.exposition import Exposition

logger = logging.getLogger(__name__)

_MAX_RETRY_SECONDS = 30.0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the monitor's settings."""
    return reader.build_parser(
        InstallationSettings,
        prog="evergreen monitor run",
        description=(__doc__ or "").split("\n")[0],
    )


@exits_with_code
def main(argv: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    """Run the monitor until it receives SIGTERM or SIGINT."""
    parser = build_parser()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    settings = read_settings(
        InstallationSettings,
        parser.parse_args(argv),
        environment=environment,
        prefix=ENVIRONMENT_PREFIX,
    )
    configure_logging(settings.log_format)
    # Make new files private, because state and archive contain what users looked at.
    umask = os.umask(0o077)
    try:
        run(settings, stop, umask=umask)
    finally:
        os.umask(umask)
    return ExitCode.DONE


def run(settings: InstallationSettings, stop: threading.Event, *, umask: int = -1) -> None:
    """Serve the pages and run the loop until `stop` is set.

    Args:
        settings: Settings of the installation.
        stop: Event that ends the loop.
        umask: Umask of the runs that the monitor starts locally. -1 keeps the process's own.

    Raises:
        TemporaryError: Another monitor has the state folder open.
        PermanentError: The port is in use.
    """
    from monitoring.state.store import STORE_FILE, StateStore
    from monitoring.web.exposition import Exposition
    from monitoring.web.page import read_history, status_page
    from monitoring.web.server import MonitorServer, read_report

    exposition = Exposition()

    def page() -> str:
        return status_page(
            exposition, read_history(settings.state, settings.store), now=time.time()
        )

    server = MonitorServer(
        exposition, settings.http, page=page, report=lambda path: read_report(settings.store, path)
    )
    with closing(server):
        try:
            with closing(StateStore(settings.state / STORE_FILE)) as store:
                server.write_address(settings.state)
                _run_loop(settings, store, exposition=exposition, stop=stop, umask=umask)
        except BaseException as error:
            exposition.end(f"{type(error).__name__}: {error}")
            raise


def _run_loop(
    settings: InstallationSettings,
    store: "StateStore",
    *,
    exposition: "Exposition",
    stop: threading.Event,
    umask: int,
) -> None:
    """Run iterations of the loop until `stop` is set, then drain the log and the archive.

    After a TemporaryError, such as an unreachable log or a registry without a recommender, the loop
    retries with growing pauses. Ending the process would not help, because the supervisor would
    also wait before a restart. Any other error ends the process, so that the supervisor reports it.
    """
    from evergreen.events.locations import open_subscriber, partition_urls
    from monitoring.monitor import Monitor
    from monitoring.retraining.actions import make_trigger

    subscriber: Subscriber | None = None
    monitor: Monitor | None = None
    tick_seconds = pause = settings.records.tick_seconds
    log = partition_urls(settings.log)[settings.partition]
    with ExitStack() as opened:
        while not stop.is_set():
            try:
                subscriber = subscriber or opened.enter_context(closing(open_subscriber(log)))
                if monitor is None:
                    trigger = make_trigger(
                        settings.actions, state=settings.state, store=settings.store, umask=umask
                    )
                    complete = with_rules(settings)
                    write_rules(settings.state, complete.decisions)
                    monitor = Monitor(
                        complete,
                        subscriber=subscriber,
                        store=store,
                        trigger=trigger,
                        recommender=logged_recommender(settings.store)
                        or accepted(settings.store, CURRENT),
                        exposition=exposition,
                    )
                monitor.tick()
                pause = tick_seconds
            except TemporaryError as error:
                pause = min(max(2 * pause, tick_seconds), _MAX_RETRY_SECONDS)
                exposition.record_failed_iteration(str(error))
                logger.warning("an iteration failed, and is repeated in %g s: %s", pause, error)
            stop.wait(pause)
        if monitor is not None:
            monitor.stop()


if __name__ == "__main__":
    sys.exit(main())
