"""A local Cloud Storage: the emulator from PyPI, and a front with more features.

The emulator (`gcp-storage-emulator`) stores buckets and objects, serves uploads, downloads,
listings and rewrites, counts generations and checks CRC32C. The front adds documented features of
Cloud Storage that the emulator lacks:

- preconditions (cloud.google.com/storage/docs/request-preconditions). The response is 412 if
  `ifGenerationMatch` is another generation, at the start and at the end of a resumable upload. The
  response is 404 for a read of a `generation` that is gone. The front processes requests one at a
  time, so that checking and changing a generation is atomic;
- resumable uploads (.../docs/performing-resumable-uploads): a part that has already arrived counts
  as sent, and a finished upload answers with its object again;
- metadata in a rewrite, `generation` in a download, and an error text in a 404 response.

The emulator and the front do not implement permissions, rate limits, paged listings or retention.

The front also injects faults (`Fault`) before or after the emulator.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from email import message_from_bytes
from http.client import HTTPConnection
from urllib.parse import parse_qs, quote, unquote, urlsplit

from gcp_storage_emulator.server import RequestHandler, create_server

from tests.support.http_double import HttpDouble, Reply

BUCKET = "models"


@dataclass
class Request:
    """One request to the service."""

    method: str
    path: str
    query: dict[str, list[str]]
    body: bytes
    range: str = ""
    """Range header of the request."""

    @property
    def name(self) -> str:
        """Return the object's name, or an empty string for a request about a bucket."""
        if "/o/" in self.path:
            return unquote(self.path.partition("/o/")[2].partition("/rewriteTo/")[0])
        if self.query.get("name"):
            return self.query["name"][0]
        if self.query.get("uploadType") == ["multipart"]:
            boundary = self.body.split(b"\r\n", 1)[0].removeprefix(b"--")
            head = b'Content-Type: multipart/related; boundary="' + boundary + b'"\r\n\r\n'
            return json.loads(message_from_bytes(head + self.body).get_payload()[0].get_payload())[
                "name"
            ]
        if self.query.get("uploadType") == ["resumable"] and self.body[:1] == b"{":
            return json.loads(self.body).get("name", "")
        return ""

    @property
    def is_upload(self) -> bool:
        """Return whether the request uploads content."""
        return self.path.startswith("/upload/")

    @property
    def is_download(self) -> bool:
        """Return whether the request downloads content."""
        return self.method == "GET" and (
            self.path.startswith("/download/") or self.query.get("alt") == ["media"]
        )


@dataclass
class Fault:
    """Fault that is applied to the requests for which `on` returns True."""

    on: Callable[[Request], bool]
    do: str
    """Kind of fault. `status` sends the HTTP status `self.status` without forwarding the request.
    `cut` closes the connection without forwarding the request. `lose` forwards the request but
    sends no response. `half` closes the connection after half of the response's body. `stall` sends
    half of the response's body, and then waits until the front is reset. `damage` applies `change`
    to the response's body. `hang` sends no response until the front is reset."""
    status: int = 503
    message: str = "backendError"
    times: int = 1
    """Number of requests to which the fault is applied."""
    change: Callable[[bytes], bytes] = lambda body: bytes([body[0] ^ 1]) + body[1:]
    met: int = 0


@dataclass
class Front:
    """HTTP server in front of the emulator. Set STORAGE_EMULATOR_HOST to the value of `host`."""

    host: str
    faults: list[Fault] = field(default_factory=list)
    seen: list[Request] = field(default_factory=list)
    before: Callable[[Request], None] = lambda request: None
    """Called before each request is passed on, outside the lock, so that another writer can act in
    between."""
    released: threading.Event = field(default_factory=threading.Event)
    """Event that ends hanging requests."""
    choosing: threading.Lock = field(default_factory=threading.Lock)
    """Lock for choosing a request's fault, so that each fault applies to the right number of
    requests."""

    def fail(self, on: Callable[[Request], bool], do: str, **more) -> Fault:
        """Add a fault."""
        self.faults.append(Fault(on, do, **more))
        return self.faults[-1]


class _Service:
    def __init__(self, port: int) -> None:
        self._port = port
        self._lock = threading.Lock()
        self._uploads: dict[str, tuple[str, str]] = {}
        self._finished: dict[str, tuple[int, dict[str, str], bytes]] = {}

    def pass_on(
        self, request: Request, target: str, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        with self._lock:
            refusal = None if self._is_finished(request) else self._refusal(request)
            if refusal:
                status, message = refusal
                error = {"code": status, "message": message, "errors": [{"message": message}]}
                return (
                    status,
                    {"Content-Type": "application/json"},
                    json.dumps({"error": error}).encode(),
                )
            generation = (
                self._generation(_bucket(request), request.name) if request.is_download else 0
            )
            upload = request.query.get("upload_id", [""])[0]
            if upload in self._finished:
                return self._finished[upload]
            if upload and self._is_there(target, headers.get("Content-Range", "")):
                request.body, headers = b"", {"Content-Range": "bytes */*", "Content-Length": "0"}
            status, answered, body = self._request(request.method, target, request.body, headers)
            if upload and status == 200:
                self._finished[upload] = status, answered, body
            if status == 200 and "/rewriteTo/" in request.path:
                body = self._with_metadata(request, body)
        if request.is_download and generation:
            answered["X-Goog-Generation"] = str(generation)
        if "upload_id" in answered.get("Location", ""):
            condition = request.query.get("ifGenerationMatch", [""])[0]
            upload = parse_qs(urlsplit(answered["Location"]).query)["upload_id"][0]
            self._uploads[upload] = (request.name, condition)
        if status == 404 and not body:
            message = f"No such object: {_bucket(request)}/{request.name}"
            if not self._has_bucket(_bucket(request)):
                message = "The specified bucket does not exist."
            body = json.dumps(
                {"error": {"code": 404, "message": message, "errors": [{"message": message}]}}
            ).encode()
            answered["Content-Type"] = "application/json"
        return status, answered, body

    def _refusal(self, request: Request) -> tuple[int, str] | None:
        name, bucket = request.name, _bucket(request)
        wanted = request.query.get("ifGenerationMatch", [""])[0]
        if "upload_id" in request.query:
            name, wanted = self._uploads.get(request.query["upload_id"][0], (name, wanted))
        if "/rewriteTo/" in request.path:
            source = request.query.get("sourceGeneration", [""])[0]
            if source and int(source) != self._generation(bucket, name):
                return 404, f"No such object: {bucket}/{name}"
            name = unquote(request.path.partition("/rewriteTo/")[2].partition("/o/")[2])
        found = self._generation(bucket, name) if name else 0
        if wanted and int(wanted) != found and not (request.method == "DELETE" and not found):
            return 412, "At least one of the pre-conditions you specified did not hold."
        generation = request.query.get("generation", [""])[0]
        if generation and request.method == "GET" and int(generation) != found:
            return 404, f"No such object: {bucket}/{name}"
        return None

    def _generation(self, bucket: str, name: str) -> int:
        status, _, body = self._request(
            "GET", f"/storage/v1/b/{bucket}/o/{quote(name, safe='')}", b"", {}
        )
        return int(json.loads(body)["generation"]) if status == 200 else 0

    def _is_finished(self, request: Request) -> bool:
        return request.query.get("upload_id", [""])[0] in self._finished

    def _is_there(self, target: str, content_range: str) -> bool:
        """Return whether the bytes of the part `content_range` have arrived before."""
        part = re.match(r"bytes (\d+)-(\d+)/", content_range)
        if part is None or part[1] == "0":
            return False
        _, headers, _ = self._request(
            "PUT", target, b"", {"Content-Range": "bytes */*", "Content-Length": "0"}
        )
        received = re.match(r"bytes=0-(\d+)", headers.get("Range", ""))
        return received is not None and int(received[1]) >= int(part[2])

    def _with_metadata(self, request: Request, body: bytes) -> bytes:
        """Apply the metadata in the rewrite's body to the object, and return the answer."""
        answer, bucket = json.loads(body), _bucket(request)
        name = quote(answer["resource"]["name"], safe="")
        metadata = json.dumps(
            {"metadata": json.loads(request.body or b"{}").get("metadata")}
        ).encode()
        headers = {"Content-Type": "application/json"}
        _, _, resource = self._request(
            "PATCH", f"/storage/v1/b/{bucket}/o/{name}", metadata, headers
        )
        return json.dumps({**answer, "resource": json.loads(resource)}).encode()

    def _has_bucket(self, bucket: str) -> bool:
        return self._request("GET", f"/storage/v1/b/{bucket}", b"", {})[0] == 200

    def _request(self, method: str, target: str, body: bytes, headers: dict[str, str]):
        connection = HTTPConnection("127.0.0.1", self._port, timeout=30)
        try:
            connection.request(method, target, body or None, headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()


def _bucket(request: Request) -> str:
    return request.path.partition("/b/")[2].partition("/")[0]


class CloudStorage(HttpDouble):
    """The emulator and its front, which run within a `with` block. The bucket is `BUCKET`."""

    def __enter__(self) -> "CloudStorage":
        # Head and body are sent separately. Nagle's algorithm would delay each body by 40 ms.
        RequestHandler.disable_nagle_algorithm = True
        self._emulator = create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET)
        self._emulator.start()
        self._service = _Service(self._emulator._api._httpd.server_address[1])
        super().__init__()
        self.front = Front(host=self.url)
        return self

    def answer(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> Reply | None:
        parsed, front = urlsplit(path), self.front
        request = Request(method, parsed.path, parse_qs(parsed.query, keep_blank_values=True), body)
        request.range = headers.get("Range", "")
        front.seen.append(request)
        with front.choosing:
            fault = next((f for f in front.faults if f.met < f.times and f.on(request)), None)
            if fault:
                fault.met += 1
        do = fault.do if fault else ""
        if do == "hang":
            front.released.wait(60)
        if do in ("cut", "hang"):
            return None
        if fault and do == "status":
            error = {
                "code": fault.status,
                "message": fault.message,
                "errors": [{"message": fault.message}],
            }
            return Reply(json.dumps({"error": error}).encode(), fault.status)
        front.before(request)
        hop = ("connection", "transfer-encoding")
        passed = {name.title(): value for name, value in headers.items() if name.lower() not in hop}
        status, answered, content = self._service.pass_on(request, path, passed)
        if do == "lose":
            return None
        if fault and do == "damage":
            content = fault.change(content)
        own = ("content-length", "connection", "server", "date")
        forwarded = {name: value for name, value in answered.items() if name.lower() not in own}
        if do in ("half", "stall"):
            forwarded["Content-Length"] = str(len(content))
            return Reply(self._half(content, stall=do == "stall"), status, forwarded)
        return Reply(content, status, forwarded)

    def _half(self, content: bytes, *, stall: bool) -> Iterator[bytes]:
        yield content[: len(content) // 2]
        if stall:
            self.front.released.wait(60)

    def reset(self) -> None:
        """Empty the bucket and drop the faults."""
        self._emulator.wipe(keep_buckets=True)
        front = self.front
        front.released.set()
        front.released = threading.Event()
        front.faults.clear()
        front.seen.clear()
        front.before = lambda request: None

    def __exit__(self, *error) -> None:
        self.front.released.set()
        self.close()
        self._emulator.stop()
