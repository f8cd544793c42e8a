"""What the monitor shows over HTTP: /metrics (Prometheus), /healthz and /status.

In: snapshots that the loop puts up, one per turn. A gauge whose number does not exist is absent. The numbers
themselves are `monitoring.measures.kpis`' and `monitoring.memory.store`'s.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from components.contracts.durable import write_whole
from components.contracts.errors import PermanentError
from monitoring.measures.kpis import Kpis

logger = logging.getLogger(__name__)

HTTP_FILE = "http.json"
STALL_SECONDS = 60.0
"""A loop silent for longer is stuck; longer than any single call it makes may take."""
RECORD_OUTCOMES = {
    "predicted": "rows of stored prediction batches",
    "outcome": "stored outcomes",
    "matured": "rows whose label became final",
    "archived": "rows in sealed archive files",
    "duplicate": "messages delivered again",
    "late_outcome": "clicks after their attribution window",
    "unmatched_outcome": "clicks on rows or requests that were never predicted",
    "set_aside": "messages that could not be used",
}
REQUEST_OUTCOMES = ("started", "released", "refused", "failed", "notified")
_KPI_GAUGES = {
    "auc": ("rolling_auc", "AUC of the window; absent while undefined"),
    "auc_low": ("rolling_auc_low", "Lower end of the AUC's 95 % interval"),
    "auc_high": ("rolling_auc_high", "Upper end of the AUC's 95 % interval"),
    "log_loss": ("log_loss", "Mean negative log likelihood of the window, nats"),
    "calibration": ("calibration", "Expected clicks per observed click in the window"),
    "ctr": ("click_rate", "Clicks per row of the window"),
    "rows": ("window_rows", "Matured rows in the window"),
    "clicks": ("window_clicks", "Clicks in the window"),
}


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything shown, as of one turn of the loop."""

    counters: dict[str, float] = field(default_factory=dict)
    pending_rows: int = 0
    log_backlog: int | None = None
    last_record_time: float | None = None
    serving_version: int | None = None
    windows: tuple[Kpis, ...] = ()
    decision: str | None = None
    """The policy's last answer, with its reason."""
    retraining: dict[str, Any] = field(default_factory=dict)


class Exposition:
    """The snapshot on show and the loop's heartbeat."""

    def __init__(self, *, stall_seconds: float = STALL_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        """Shows nothing yet, healthy.

        Args:
            stall_seconds: Silence of the loop after which it counts as stuck.
            clock: Monotonic seconds.
        """
        self._stall_seconds, self._clock = stall_seconds, clock
        self._last_beat = clock()
        self._ended: str | None = None
        self.snapshot = Snapshot()

    def beat(self, snapshot: Snapshot) -> None:
        """Shows a new snapshot; the loop is alive."""
        self.snapshot, self._last_beat = snapshot, self._clock()

    def end(self, reason: str) -> None:
        """The loop has ended; from now on unhealthy."""
        self._ended = reason

    def unhealthy(self) -> str | None:
        """Why the monitor is unhealthy; None while it is not."""
        if self._ended is not None:
            return f"the loop has ended: {self._ended}"
        silence = self._clock() - self._last_beat
        return f"the loop is silent for {silence:.0f} s" if silence > self._stall_seconds else None

    def collect(self) -> Iterator[Metric]:
        """The metrics of the snapshot, for prometheus_client."""
        shown = self.snapshot
        for field_name, (name, text) in _KPI_GAUGES.items():
            gauge = GaugeMetricFamily(f"ctr_monitor_{name}", text, labels=["version"])
            for kpis in shown.windows:
                if (value := getattr(kpis, field_name)) is not None:
                    gauge.add_metric([str(kpis.version)], value)
            yield gauge
        yield _counters("records", "Records by what became of them", RECORD_OUTCOMES, shown.counters, "")
        yield _counters("retrain_requests", "Retraining runs", REQUEST_OUTCOMES, shown.counters, "request_")
        for name, text, value in (
            ("last_record_timestamp_seconds", "Time of the newest prediction", shown.last_record_time),
            ("serving_version", "Model version of the newest prediction", shown.serving_version),
            ("log_backlog", "Messages published and not acknowledged", shown.log_backlog),
            ("pending_rows", "Rows whose attribution window is open", shown.pending_rows),
        ):
            yield GaugeMetricFamily(f"ctr_monitor_{name}", text, value=value)

    def metrics_page(self) -> bytes:
        """The snapshot in Prometheus' text format."""
        registry = CollectorRegistry()
        registry.register(self)  # type: ignore[arg-type]
        return generate_latest(registry)

    def status_page(self) -> bytes:
        """The snapshot as JSON."""
        return json.dumps({**asdict(self.snapshot), "unhealthy": self.unhealthy()}, indent=2, default=str).encode()


class Server:
    """Serves one exposition from a daemon thread."""

    def __init__(self, exposition: Exposition, *, host: str, port: int, state: Path) -> None:
        """Listens; the address goes to `<state>/http.json`.

        Raises:
            PermanentError: the port is taken or may not be used.
        """

        class Handler(_Handler):
            shown = exposition

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise PermanentError(f"http_port {port} on {host} cannot be used: {error}") from error
        self._server.daemon_threads = True
        self.host, self.port = host, int(self._server.server_address[1])
        write_whole(state / HTTP_FILE, json.dumps({"host": self.host, "port": self.port}) + "\n")
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True).start()
        logger.info("listening on http://%s:%d", self.host, self.port)

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    shown: Exposition
    timeout = 10.0
    """A client that connects and says nothing must not hold its thread for ever."""

    def do_GET(self) -> None:
        """Answers one page."""
        path = urlsplit(self.path).path
        if path == "/metrics":
            self._answer(200, "text/plain; version=0.0.4; charset=utf-8", self.shown.metrics_page())
        elif path == "/status":
            self._answer(200, "application/json", self.shown.status_page())
        elif path == "/healthz":
            reason = self.shown.unhealthy()
            self._answer(503 if reason else 200, "text/plain", (reason or "ok").encode() + b"\n")
        else:
            self._answer(404, "text/plain", b"pages: /metrics /healthz /status\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Keeps probes out of the log."""
        logger.debug(format, *args)

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        with suppress(ConnectionError):  # the client has gone
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)


def _counters(name: str, text: str, outcomes: Any, counters: dict[str, float], prefix: str) -> CounterMetricFamily:
    family = CounterMetricFamily(f"ctr_monitor_{name}", text, labels=["outcome"])
    for outcome in outcomes:
        family.add_metric([outcome], counters.get(prefix + outcome, 0))
    return family
