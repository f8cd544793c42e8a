"""A daemon for the real docker command that keeps what it is sent: each build's context and settings, each push.

It builds nothing. What the command sends is the truth about `.dockerignore` and about flags; the daemon's part of the
protocol (Docker Engine API: /_ping, /info, /build, /images/NAME/push, /images/NAME/json) is answered as it has to be.
"""

from __future__ import annotations

import io
import json
import tarfile
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

IMAGE = "sha256:" + "1" * 64
DIGEST = "sha256:" + "2" * 64


@dataclass
class Build:
    """One request to build."""

    settings: dict[str, str]
    context: bytes

    def names(self) -> set[str]:
        """The files of the context."""
        with tarfile.open(fileobj=io.BytesIO(self.context)) as archive:
            return {member.name for member in archive if member.isfile()}

    def extract(self, folder: Path) -> Path:
        with tarfile.open(fileobj=io.BytesIO(self.context)) as archive:
            archive.extractall(folder, filter="data")
        return folder


@dataclass
class Daemon:
    """Listens on a socket between `with`; `builds` and `pushes` hold what came."""

    socket: Path
    builds: list[Build] = field(default_factory=list)
    pushes: list[str] = field(default_factory=list)

    def __enter__(self) -> Daemon:
        self._server = _Server(str(self.socket), _Handler)
        self._server.daemon = self
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingMixIn, UnixStreamServer):
    daemon_threads = True
    daemon: Daemon

    def get_request(self) -> Any:
        connection, _ = super().get_request()
        return connection, ("local", 0)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(b"", "text/plain")

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path.endswith("/_ping"):
            self._answer(b"OK", "text/plain")
        elif path.endswith("/info"):
            self._answer(json.dumps({"ID": "test", "ServerVersion": "28.0", "OSType": "linux"}).encode())
        elif path.endswith("/json"):
            reference = unquote(path.partition("/images/")[2].removesuffix("/json"))
            pushed = [f"{reference.rpartition(':')[0]}@{DIGEST}"] if reference in self.server.daemon.pushes else []
            self._answer(json.dumps({"Id": IMAGE, "RepoDigests": pushed, "RepoTags": [reference]}).encode())
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        parts, body = urlsplit(self.path), self._body()
        settings = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if parts.path.endswith("/build"):
            self.server.daemon.builds.append(Build(settings, body))
            self._answer(json.dumps({"aux": {"ID": IMAGE}}).encode() + b"\n")
        elif parts.path.endswith("/push"):
            name = unquote(parts.path.partition("/images/")[2].removesuffix("/push"))
            self.server.daemon.pushes.append(f"{name}:{settings['tag']}")
            self._answer(json.dumps({"status": "pushed"}).encode() + b"\n")
        else:
            self.send_error(404)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _answer(self, body: bytes, kind: str = "application/json") -> None:
        self.send_response(200)
        for name, value in (("Api-Version", "1.43"), ("Ostype", "linux"), ("Content-Type", kind)):
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
