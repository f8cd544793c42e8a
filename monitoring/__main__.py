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
from collections.abc import Mapping, Sequence

from components.contracts.errors import ContractError, PermanentError, TemporaryError
from monitoring.settings import MonitorSettings, build_parser, read_settings

logger = logging.getLogger(__name__)

MAX_RETRY_SECONDS = 30.0


def main(argv: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    """Runs the monitor; 0 stopped on request, 1 it could not go on, 2 misuse."""
    parser = build_parser(MonitorSettings, prog="python -m monitoring", description=(__doc__ or "").split("\n")[0])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        run(read_settings(MonitorSettings, parser, argv, environment), stop)
    except ContractError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (PermanentError, TemporaryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def run(settings: MonitorSettings, stop: threading.Event) -> None:
    """Runs the monitor until `stop` is set, then takes in and archives what is there.

    A log that is busy or away is tried again, at longer and longer pauses; any other failure ends the process, so
    that whoever supervises it sees it.
    """
    from components.logs.locations import open_log
    from monitoring.acting.triggers import make_trigger
    from monitoring.memory.store import Store
    from monitoring.monitor import Monitor
    from monitoring.showing.exposition import Exposition, Server

    subscriber, lease_seconds = open_log(settings.log)
    store = Store(settings.state / "monitor.db")
    exposition = Exposition()
    server = Server(exposition, host=settings.http_host, port=settings.http_port, state=settings.state)
    try:
        monitor = Monitor(
            settings,
            subscriber=subscriber,
            lease_seconds=lease_seconds,
            store=store,
            trigger=make_trigger(settings),
            exposition=exposition,
        )
        pause = settings.tick_seconds
        while not stop.wait(pause):
            try:
                monitor.tick()
                pause = settings.tick_seconds
            except TemporaryError as error:
                pause = min(max(2 * pause, settings.tick_seconds), MAX_RETRY_SECONDS)
                exposition.beat(exposition.snapshot)
                logger.warning("turn cut short, next in %g s: %s", pause, error)
        monitor.stop()
    except BaseException as error:
        exposition.end(f"{type(error).__name__}: {error}")
        raise
    finally:
        server.close()
        store.close()
        subscriber.close()


if __name__ == "__main__":
    sys.exit(main())
