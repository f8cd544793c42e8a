"""An HTTP server for tests, in its own threads. A subclass defines its answers."""

import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple


class Reply(NamedTuple):
    """Answer to a request."""

    body: bytes
    status: int = 200
    headers: Mapping[str, str] = {}


class HttpDouble:
    """Serves until `close`.

    A subclass sets up its state before calling this constructor.
    """

    def __init__(self) -> None:
        double = self

        class Handler(BaseHTTPRequestHandler):
            def handle_one_request(self) -> None:
                self.raw_requestline = self.rfile.readline()
                if not self.raw_requestline or not self.parse_request():
                    return
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                reply = double.answer(self.command, self.path, body, self.headers)
                if reply is None:
                    return
                self.send_response(reply.status)
                for name, value in {
                    **reply.headers,
                    "Content-Length": str(len(reply.body)),
                }.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(reply.body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()

    def answer(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> Reply | None:
        """Return the answer to this request, or None to end the connection without an answer."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop the server."""
        self.server.shutdown()
        self.server.server_close()


class Page(HttpDouble):
    """Serves one text at `path`."""

    def __init__(self, text: str, path: str = "/metrics") -> None:
        self.text, self.path = text, path
        super().__init__()

    def answer(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        kind = {"Content-Type": "text/plain; version=0.0.4"}
        return Reply(self.text.encode(), headers=kind) if path == self.path else Reply(b"", 404)
