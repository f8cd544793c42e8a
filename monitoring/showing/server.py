"""The monitor's pages over HTTP: `/` (the status page), /reports/, /metrics, /healthz, /readyz and /status (JSON).

What is on them is left to `showing.page`, `showing.run_reports`, `showing.metrics` and `showing.exposition`. No page
changes anything, so there is nothing to log in to; who may reach the port is the network's business.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from components.runtime.durable import write_whole
from components.runtime.errors import PermanentError
from monitoring.showing.exposition import Exposition
from monitoring.showing.metrics import metrics_page
from monitoring.showing.run_reports import PREFIX

logger = logging.getLogger(__name__)

HTTP_FILE = "http.json"


class Server:
    """Serves one exposition from a daemon thread."""

    def __init__(
        self,
        exposition: Exposition,
        *,
        host: str,
        port: int,
        page: Callable[[], str] | None = None,
        report: Callable[[str], bytes | None] | None = None,
    ) -> None:
        """Listens.

        Args:
            exposition: What is shown.
            host: Address to listen on.
            port: 0 = a free one.
            page: Makes the status page, HTML; None = there is none.
            report: The report, HTML, that a path below /reports/ names (`run_reports`); None = there is none.

        Raises:
            PermanentError: the port is taken or may not be used.
        """

        class Handler(_Handler):
            shown = exposition
            make_page = staticmethod(page or (lambda: ""))
            find_report = staticmethod(report or (lambda path: None))

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise PermanentError(f"http_port {port} on {host} cannot be used: {error}") from error
        self._server.daemon_threads = True
        self.host, self.port = host, int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True).start()
        logger.info("listening on http://%s:%d", self.host, self.port)

    def write_address(self, state: Path) -> None:
        """Says in `<state>/http.json` where this listens, unless it says so already; for whose folder that is."""
        path, text = state / HTTP_FILE, json.dumps({"host": self.host, "port": self.port}) + "\n"
        if not path.exists() or path.read_text() != text:
            write_whole(path, text)

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    shown: Exposition
    make_page: Callable[[], str]
    find_report: Callable[[str], bytes | None]
    timeout = 10.0
    """A client that connects and says nothing must not hold its thread for ever."""

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
        elif path.startswith(PREFIX) and (report := self.find_report(path)) is not None:
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
            # The page holds its own style and nothing else: whatever a name in a record says, no script runs.
            self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; img-src data:")
            self.end_headers()
            self.wfile.write(body)
