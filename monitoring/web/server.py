"""HTTP server of the monitor's pages, run reports and model cards.

The server answers `/` (the status page), /reports/, /models/ (cards), /metrics, /healthz, /readyz
and /status (JSON). `web.page`, `web.metrics` and `web.exposition` render the monitor's pages, and
reports and cards come from the model registry. No page changes anything, so there is no login. The
network decides who may reach the port.

The path of a request contains a run and a step, or a version. It is never used as the path of a
file. A report is a regular file with a fixed name in the run's own folder, and has at most
`_MAX_BYTES`. A card is rendered for each request, so it always matches the promotion journal.
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

_PREFIX = "/reports/"
CARDS = "/models/"
"""Prefix of a card's path. The model's version number follows the prefix."""
_MAX_BYTES = 20_000_000


def link_to(run: str, step: str) -> str:
    """Return the link to a report on the same server.

    >>> link_to("hourly 1", "validation")
    '/reports/hourly%201/validation'
    """
    return f"{_PREFIX}{quote(run, safe='')}/{quote(step, safe='')}"


def read_report(store: Path, path: str) -> bytes | None:
    """Return the HTML of the report or card that a request's path names, or None."""
    if re.fullmatch(f"{CARDS}[1-9][0-9]{{0,9}}", path):
        try:
            return card_page(read_card(store, path.removeprefix(CARDS))).encode()
        except (ContractError, OSError):
            return None
    parts = path.removeprefix(_PREFIX).split("/")
    if not path.startswith(_PREFIX) or len(parts) != 2:
        return None
    run, step = map(unquote, parts)
    if step not in STEPS or "\0" in run:
        return None
    try:
        found = report_path(store, run, step)
        return (
            _read_regular_file(found)
            if found.parent.resolve() == store.resolve() / "runs" / run
            else None
        )
    except (ContractError, OSError):
        return None


def _read_regular_file(path: Path) -> bytes | None:
    # Reject links to other files, and pipes, which would block the thread.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        known = os.fstat(descriptor)
        return file.read() if stat.S_ISREG(known.st_mode) and known.st_size <= _MAX_BYTES else None


logger = logging.getLogger(__name__)

HTTP_FILE = "http.json"


@dataclass(frozen=True, kw_only=True)
class HttpSettings:
    """Address of the pages."""

    http_host: str = "127.0.0.1"
    """Address of the status page, /metrics, /healthz, /readyz and /status."""
    http_port: int = 9464
    """Port of the pages. 0 = the system selects a free port, which is written to
    `<state>/http.json`."""

    def __post_init__(self) -> None:
        expect(self, "0 to 65535", lambda value: 0 <= value < 65536, "http_port")


class MonitorServer:
    """Serves the pages of one `Exposition` from a daemon thread."""

    def __init__(
        self,
        exposition: Exposition,
        settings: HttpSettings,
        *,
        page: Callable[[], str] | None = None,
        report: Callable[[str], bytes | None] | None = None,
    ) -> None:
        """Start listening.

        `report` returns the HTML of a path below /reports/ or /models/, or None (`read_report`).

        Raises:
            PermanentError: The port is in use or not permitted.
        """

        class Handler(_Handler):
            shown = exposition
            make_page = staticmethod(page or (lambda: ""))
            find_report = staticmethod(report or (lambda path: None))

        self.host = settings.http_host
        try:
            self._server = ThreadingHTTPServer((self.host, settings.http_port), Handler)
        except OSError as error:
            raise PermanentError(
                f"http_port {settings.http_port} on {self.host} cannot be used: {error}"
            ) from error
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True
        ).start()
        logger.info("listening on http://%s:%d", self.host, self.port)

    def write_address(self, state: Path) -> None:
        """Write the server's address to `<state>/http.json`.

        The caller must have the state folder open.
        """
        write_whole(state / HTTP_FILE, json.dumps({"host": self.host, "port": self.port}) + "\n")

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    shown: Exposition
    make_page: Callable[[], str]
    find_report: Callable[[str], bytes | None]
    timeout = 10.0
    """Seconds after which a silent client is disconnected, so that it does not block its thread."""

    def do_GET(self) -> None:
        """Answer a GET request for one page."""
        path = urlsplit(self.path).path
        if path == "/metrics":
            self._answer(
                200, "text/plain; version=0.0.4; charset=utf-8", metrics_page(self.shown.snapshot)
            )
        elif path == "/status":
            self._answer(200, "application/json", self.shown.status())
        elif path == "/healthz":
            self._answer_probe(self.shown.unhealthy())
        elif path == "/readyz":
            self._answer_probe(self.shown.unready())
        elif path == "/" and (page := self.make_page()):
            self._answer(200, "text/html; charset=utf-8", page.encode())
        elif path.startswith((_PREFIX, CARDS)) and (report := self.find_report(path)) is not None:
            self._answer(200, "text/html; charset=utf-8", report)
        else:
            self._answer(404, "text/plain", b"pages: / /metrics /healthz /readyz /status\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Log requests at debug level, because probes are frequent."""
        logger.debug(format, *args)

    def _answer_probe(self, reason: str | None) -> None:
        self._answer(503 if reason else 200, "text/plain", (reason or "ok").encode() + b"\n")

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        with suppress(ConnectionError):  # the client has disconnected
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            # The page needs only its own style. A script cannot run, even if a name in the records
            # contains a script.
            self.send_header(
                "Content-Security-Policy",
                "default-src 'none'; style-src 'unsafe-inline'; img-src data:",
            )
            self.end_headers()
            self.wfile.write(body)
