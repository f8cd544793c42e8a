"""The monitor's pages over HTTP, and the reports of runs and cards of models, which it reads from the model store.

`/` (the status page), /reports/, /models/ (cards), /metrics, /healthz, /readyz and /status (JSON). The other contents
are left to `web.page`, `web.metrics` and `web.exposition`. No page changes anything, so there is no login;
who may reach the port is decided by the network.

A request names a run and a step, or a version, and nothing else: no path of a request reaches the file system. Of a
report only a regular file of that one name is read, below the run's own folder, of at most `MAX_BYTES`. A card's page
is made anew for each request, so it is never behind the promotion journal.
"""

import json
import logging
import os
import re
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from evergreen.registry.model_cards import read_card
from evergreen.registry.runs import STEPS, report_path
from evergreen.reports.model_card import card_page
from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import ContractError, PermanentError, expect
from monitoring.web.exposition import Exposition
from monitoring.web.metrics import metrics_page

PREFIX = "/reports/"
CARDS = "/models/"
"""Before the number of the version whose model the card is about."""
MAX_BYTES = 20_000_000


def link_to(run: str, step: str) -> str:
    """The page's link, to the server itself.

    >>> link_to("hourly 1", "validation")
    '/reports/hourly%201/validation'
    """
    return f"{PREFIX}{quote(run, safe='')}/{quote(step, safe='')}"


def read_report(store: Path, path: str) -> bytes | None:
    """The report or card that a request's path names, HTML; None where there is none or it names something else."""
    if re.fullmatch(f"{CARDS}[1-9][0-9]{{0,9}}", path):
        try:
            return card_page(read_card(store, path.removeprefix(CARDS))).encode()
        except (ContractError, OSError):
            return None
    parts = path.removeprefix(PREFIX).split("/")
    if not path.startswith(PREFIX) or len(parts) != 2:
        return None
    run, step = map(unquote, parts)
    if step not in STEPS or "\0" in run:
        return None
    try:
        found = report_path(store, run, step)
        return _read_regular_file(found) if found.parent.resolve() == store.resolve() / "runs" / run else None
    except (ContractError, OSError):
        return None


def _read_regular_file(path: Path) -> bytes | None:
    # Neither a link to another place nor a pipe, which would block the thread.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        known = os.fstat(descriptor)
        return file.read() if stat.S_ISREG(known.st_mode) and known.st_size <= MAX_BYTES else None


logger = logging.getLogger(__name__)

HTTP_FILE = "http.json"


@dataclass(frozen=True, kw_only=True)
class HttpSettings:
    """Where the pages are served."""

    http_host: str = "127.0.0.1"
    """Address of the status page, /metrics, /healthz, /readyz and /status."""
    http_port: int = 9464
    """Port of the same; 0 = a free one, written to `<state>/http.json`."""

    def __post_init__(self) -> None:
        expect(self, "0 to 65535", lambda value: 0 <= value < 65536, "http_port")


class MonitorServer:
    """Serves one exposition from a daemon thread."""

    def __init__(
        self,
        exposition: Exposition,
        settings: HttpSettings,
        *,
        page: Callable[[], str] | None = None,
        report: Callable[[str], bytes | None] | None = None,
    ) -> None:
        """Starts listening.

        `report` gives the HTML that a path below /reports/ or /models/ names (`read_report`); None = there is none.

        Raises:
            PermanentError: the port is taken or may not be used.
        """

        class Handler(_Handler):
            shown = exposition
            make_page = staticmethod(page or (lambda: ""))
            find_report = staticmethod(report or (lambda path: None))

        self.host = settings.http_host
        try:
            self._server = ThreadingHTTPServer((self.host, settings.http_port), Handler)
        except OSError as error:
            raise PermanentError(f"http_port {settings.http_port} on {self.host} cannot be used: {error}") from error
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True).start()
        logger.info("listening on http://%s:%d", self.host, self.port)

    def write_address(self, state: Path) -> None:
        """Writes to `<state>/http.json` where this listens; the caller holds the state folder."""
        write_whole(state / HTTP_FILE, json.dumps({"host": self.host, "port": self.port}) + "\n")

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    shown: Exposition
    make_page: Callable[[], str]
    find_report: Callable[[str], bytes | None]
    timeout = 10.0
    """A client that connects and sends nothing must not hold its thread forever."""

    def do_GET(self) -> None:
        """Answers one page."""
        path = urlsplit(self.path).path
        if path == "/metrics":
            self._answer(200, "text/plain; version=0.0.4; charset=utf-8", metrics_page(self.shown.snapshot))
        elif path == "/status":
            self._answer(200, "application/json", self.shown.status())
        elif path == "/healthz":
            self._answer_probe(self.shown.unhealthy())
        elif path == "/readyz":
            self._answer_probe(self.shown.unready())
        elif path == "/" and (page := self.make_page()):
            self._answer(200, "text/html; charset=utf-8", page.encode())
        elif path.startswith((PREFIX, CARDS)) and (report := self.find_report(path)) is not None:
            self._answer(200, "text/html; charset=utf-8", report)
        else:
            self._answer(404, "text/plain", b"pages: / /metrics /healthz /readyz /status\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Keeps probes out of the log."""
        logger.debug(format, *args)

    def _answer_probe(self, reason: str | None) -> None:
        self._answer(503 if reason else 200, "text/plain", (reason or "ok").encode() + b"\n")

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        with suppress(ConnectionError):  # the client has gone
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            # The page contains its own style and nothing else: whatever a name in a record contains, no script runs.
            self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; img-src data:")
            self.end_headers()
            self.wfile.write(body)
