"""An HTTP server for tests, in its own threads. Each subclass defines the responses."""

import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple


class Reply(NamedTuple):
    """HTTP response of the test double."""

    body: bytes | Iterable[bytes]
    """Content of the response. Chunks are sent one by one, and the connection ends after the last
    chunk."""
    status: int = 200
    headers: Mapping[str, str] = {}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    """The handler sends head and body separately. Nagle's algorithm would delay the body by 40
    ms."""
    double: "HttpDouble"

    def handle_one_request(self) -> None:
        self.close_connection = True
        self.raw_requestline = self.rfile.readline()
        if not self.raw_requestline or not self.parse_request():
            return
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            content = b"".join(iter(self._chunk, b""))
        else:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        reply = self.double.answer(self.command, self.path, content, self.headers)
        if reply is None:
            self.close_connection = True
            return
        is_whole = isinstance(reply.body, bytes)
        headers = {"Content-Length": str(len(reply.body))} if is_whole else {}
        self.send_response(reply.status)
        for name, value in {**reply.headers, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        # Some tests close the connection on purpose.
        with suppress(OSError):
            for chunk in (reply.body,) if is_whole else reply.body:
                self.wfile.write(chunk)
                self.wfile.flush()
        self.close_connection |= not is_whole

    def _chunk(self) -> bytes:
        """Return the next chunk of the request. At the end of the request, the chunk is empty."""
        chunk = self.rfile.read(int(self.rfile.readline().split(b";")[0], 16))
        self.rfile.readline()
        return chunk

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors of closed connections. Some tests close a connection on purpose."""


class HttpDouble:
    """Serves until `close`.

    Subclasses must set their attributes before they call `HttpDouble.__init__`.
    """

    def __init__(self) -> None:
        self.server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"double": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()

    def answer(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> Reply | None:
        """Return the response to a request. None closes the connection without a response."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop the server."""
        self.server.shutdown()
        self.server.server_close()


class Page(HttpDouble):
    """Server that returns one text for `path`."""

    def __init__(self, text: str, path: str = "/metrics") -> None:
        self.text, self.path = text, path
        super().__init__()

    def answer(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        kind = {"Content-Type": "text/plain; version=0.0.4"}
        return Reply(self.text.encode(), headers=kind) if path == self.path else Reply(b"", 404)
