"""The monitor as a process: `python -m monitoring --log sqlite:///... --state DIR --archive DIR --store DIR`.

Reads the settings (flags, else `EVERGREEN_MONITOR_*`) and the store's recommender, which says how to decide; opens what
the loop needs, runs it until SIGTERM or SIGINT.
What the loop does is `monitoring.monitor`'s.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from evergreen.config.reader import build_parser, read_settings
from evergreen.contracts.manifests import CURRENT
from evergreen.registry.recommenders import accepted, logged_recommender
from evergreen.runtime.errors import TemporaryError
from evergreen.runtime.exit_codes import ExitCode, exits_with_code
from evergreen.runtime.plain_text import configure_logging
from monitoring.settings import ENVIRONMENT_PREFIX, InstallationSettings, with_rules
from monitoring.state.judging_file import write_judging

if TYPE_CHECKING:
    from evergreen.events.event_log import Subscriber
    from monitoring.state.store import Store
    from monitoring.web.exposition import Exposition

logger = logging.getLogger(__name__)

MAX_RETRY_SECONDS = 30.0


@exits_with_code
def main(argv: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    """Runs the monitor until it is asked to stop."""
    parser = build_parser(InstallationSettings, prog="evergreen monitor", description=(__doc__ or "").split("\n")[0])
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    settings = read_settings(
        InstallationSettings, parser.parse_args(argv), environment=environment, prefix=ENVIRONMENT_PREFIX
    )
    configure_logging(settings.log_format)
    # State and archive hold what people looked at.
    umask = os.umask(0o077)
    try:
        run(settings, stop, umask=umask)
    finally:
        os.umask(umask)
    return ExitCode.DONE


def run(settings: InstallationSettings, stop: threading.Event, *, umask: int = -1) -> None:
    """Serve the pages and run the loop until `stop` is set.

    Args:
        settings: The monitor's.
        stop: Ends the loop.
        umask: That of runs which the monitor starts here; -1 = its own.

    Raises:
        TemporaryError: another monitor holds the state folder.
        PermanentError: the port is taken.
    """
    from monitoring.state.store import STORE_FILE, Store
    from monitoring.web.exposition import Exposition
    from monitoring.web.page import read_history, status_page
    from monitoring.web.server import MonitorServer, read_report

    exposition = Exposition()

    def page() -> str:
        return status_page(exposition, read_history(settings.state, settings.store), now=time.time())

    server = MonitorServer(exposition, settings.http, page=page, report=lambda path: read_report(settings.store, path))
    with closing(server):
        try:
            with closing(Store(settings.state / STORE_FILE)) as store:
                server.write_address(settings.state)
                _run_loop(settings, store, exposition=exposition, stop=stop, umask=umask)
        except BaseException as error:
            exposition.end(f"{type(error).__name__}: {error}")
            raise


def _run_loop(
    settings: InstallationSettings, store: "Store", *, exposition: "Exposition", stop: threading.Event, umask: int
) -> None:
    """Opens the log, runs turns of the loop until `stop` is set, then takes in and archives what is there.

    A log that is busy or down, and a store that holds no recommender yet, are tried again, at longer and longer pauses:
    nothing is gained by ending the process, for a supervisor would start it again, at pauses of its own. Any other
    failure ends the process, so that its supervisor sees it.
    """
    from evergreen.events.locations import open_subscriber, partition_urls
    from monitoring.monitor import Monitor
    from monitoring.retraining.acting import make_trigger

    subscriber: Subscriber | None = None
    monitor: Monitor | None = None
    tick_seconds = pause = settings.records.tick_seconds
    log = partition_urls(settings.log)[settings.partition]
    with ExitStack() as opened:
        while not stop.is_set():
            try:
                subscriber = subscriber or opened.enter_context(closing(open_subscriber(log)))
                if monitor is None:
                    trigger = make_trigger(settings.acting, state=settings.state, store=settings.store, umask=umask)
                    judged = with_rules(settings)
                    write_judging(settings.state, judged.judging)
                    monitor = Monitor(
                        judged,
                        subscriber=subscriber,
                        store=store,
                        trigger=trigger,
                        recommender=logged_recommender(settings.store) or accepted(settings.store, CURRENT),
                        exposition=exposition,
                    )
                monitor.tick()
                pause = tick_seconds
            except TemporaryError as error:
                pause = min(max(2 * pause, tick_seconds), MAX_RETRY_SECONDS)
                exposition.note_failed_turn(str(error))
                logger.warning("turn cut short, next in %g s: %s", pause, error)
            stop.wait(pause)
        if monitor is not None:
            monitor.stop()


if __name__ == "__main__":
    sys.exit(main())
