"""A KFP API server for tests: real HTTP, experiments and runs in memory, the server's own filter rules.

Faults on request: an answer of any status, to the next few requests or to all; a request that hangs; an answer that is
lost after the server has acted; a token that must be shown; a moment between looking and creating. What the real server
does and this does not: who may do what, validation of the pipeline, MySQL's collation.
"""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

FILTER_KEYS = {"run_id", "display_name", "name", "created_at", "state", "experiment_id", "namespace", "storage_state"}
STATES = {"PENDING", "RUNNING", "SUCCEEDED", "SKIPPED", "FAILED", "CANCELING", "CANCELED", "PAUSED"}


class Refused(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class KfpDouble:
    def __init__(self) -> None:
        self.experiments: list[dict] = []
        self.runs: list[dict] = []
        self.pipelines: list[dict] = []
        self.versions: list[dict] = []
        self.requests: list[tuple[str, str]] = []
        self.failure: int | None = None
        self.failures: list[int] = []  # statuses of the next answers, before any are right again
        self.lost: list[tuple[str, str]] = []  # (method, end of path) of requests that are done and never answered
        self.token: str | None = None  # what `Authorization: Bearer` must show
        self.before_create = lambda body: None  # called outside the lock: another client may create meanwhile
        self.advance: dict[str, str] = {}  # state that a run is in -> state after it was looked at by name
        self.lock = threading.Lock()
        self.silence = threading.Event()  # set: accept and never answer
        self.release = threading.Event()
        double = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer("GET")

            def do_POST(self):
                self.answer("POST")

            def do_DELETE(self):
                self.answer("DELETE")

            def answer(self, method):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if double.silence.is_set():
                    double.release.wait(30)
                    return
                try:
                    double.check_token(self.headers.get("Authorization"))
                    status, document = 200, double.reply(method, self.path, body)
                except Refused as refused:
                    status, document = refused.status, {"error": str(refused)}
                if double.loses(method, urlsplit(self.path).path):
                    self.close_connection = True
                    return
                text = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self.release.set()
        self.server.shutdown()
        self.server.server_close()

    def add_run(self, name: str, state: str, experiment_id: str = "e1") -> dict:
        assert state in STATES
        run = {
            "run_id": f"run-{len(self.runs)}",
            "display_name": name,
            "state": state,
            "experiment_id": experiment_id,
            "created_at": f"2026-01-01T{len(self.runs) // 60:02d}:{len(self.runs) % 60:02d}:00Z",
            "storage_state": "AVAILABLE",
        }
        self.runs.append(run)
        return run

    def named(self, name: str) -> list[dict]:
        return [run for run in self.runs if run["display_name"] == name]

    @property
    def active(self) -> list[dict]:
        return [run for run in self.runs if run["state"] not in ("SUCCEEDED", "SKIPPED", "FAILED", "CANCELED")]

    def check_token(self, shown: str | None) -> None:
        if self.token is not None and shown != f"Bearer {self.token}":
            self.requests.append(("REFUSED", str(shown)))
            raise Refused(401, "Request header error: there is no user identity header or token")

    def loses(self, method: str, path: str) -> bool:
        for each in self.lost:
            if method == each[0] and path.endswith(each[1]):
                self.lost.remove(each)
                return True
        return False

    def reply(self, method: str, target: str, body: bytes) -> dict:
        path = urlsplit(target).path.removeprefix("/apis/v2beta1/")
        if (method, path) == ("POST", "runs"):
            self.before_create(json.loads(body))
        with self.lock:
            return self.locked_reply(method, target, body)

    def locked_reply(self, method: str, target: str, body: bytes) -> dict:
        parts = urlsplit(target)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        self.requests.append((method, parts.path))
        if self.failure is not None:
            raise Refused(self.failure, "as the test says")
        if self.failures:
            raise Refused(self.failures.pop(0), "as the test says, this once")
        if "namespace" in query or (body and json.loads(body).get("namespace")):
            raise Refused(400, "in single-user mode a request shouldn't contain a namespace")
        path = parts.path.removeprefix("/apis/v2beta1/")
        if (method, path) == ("GET", "experiments"):
            return {"experiments": self.select(self.experiments, query)}
        if (method, path) == ("POST", "experiments"):
            if any(each["display_name"] == json.loads(body)["display_name"] for each in self.experiments):
                raise Refused(409, "experiment already exists")
            new = {"experiment_id": f"e{len(self.experiments) + 1}", **json.loads(body)}
            self.experiments.append(new)
            return new
        if (method, path) == ("GET", "runs"):
            in_scope = [run for run in self.runs if run["experiment_id"] == query.get("experiment_id")]
            chosen = self.select(in_scope, query)
            answer = self.page(chosen, query)
            if "display_name" in unquote(query.get("filter", "")):
                for run in chosen:
                    run["state"] = self.advance.get(run["state"], run["state"])
            return answer
        if (method, path) == ("POST", "runs"):
            return self.create_run(json.loads(body))
        if (method, path) == ("GET", "pipelines"):
            return {"pipelines": self.select(self.pipelines, query)}
        if method == "GET" and (found := re.fullmatch(r"pipelines/([^/]+)/versions", path)):
            return {"pipeline_versions": self.versions_of(found[1], query)}
        if (method, path) == ("GET", "healthz"):
            return {"multi_user": False}
        if found := re.fullmatch(r"runs/([^/:]+)(:terminate|:archive)?", path):
            return self.change_run(method, *found.groups())
        raise Refused(404, f"{method} {path}")

    def versions_of(self, pipeline_id: str, query: dict) -> list[dict]:
        if unknown := query.get("sort_by", "").replace("created_at desc", ""):
            raise Refused(400, f"this double does not sort by {unknown}")
        chosen = self.select([each for each in self.versions if each["pipeline_id"] == pipeline_id], query)
        # They are kept in the order in which they came.
        return (chosen[::-1] if query.get("sort_by") else chosen)[: int(query.get("page_size") or 10)]

    def change_run(self, method: str, run_id: str, verb: str | None) -> dict:
        runs = [run for run in self.runs if run["run_id"] == run_id]
        if not runs:
            raise Refused(404, f"run {run_id}")
        if (method, verb) == ("GET", None):
            return {key: value for key, value in runs[0].items() if key != "body"}
        if (method, verb) == ("POST", ":terminate"):
            if runs[0] not in self.active:
                raise Refused(400, f"run {run_id} has ended")
            runs[0]["state"] = "CANCELING"
            return {}
        if (method, verb) == ("POST", ":archive"):
            runs[0]["storage_state"] = "ARCHIVED"
            return {}
        raise Refused(404, f"{method} {run_id}{verb}")

    def create_run(self, body: dict) -> dict:
        spec, reference = body.get("pipeline_spec"), body.get("pipeline_version_reference")
        if (spec is None) == (reference is None):
            raise Refused(400, "exactly one of pipeline_spec and pipeline_version_reference")
        if body["experiment_id"] not in {each["experiment_id"] for each in self.experiments}:
            raise Refused(404, f"experiment {body['experiment_id']}")
        run = self.add_run(body["display_name"], "PENDING", body["experiment_id"])
        run["body"] = body
        return {key: value for key, value in run.items() if key != "body"}

    def select(self, rows: list[dict], query: dict) -> list[dict]:
        # The server unescapes the filter a second time.
        predicates = json.loads(unquote(query["filter"]))["predicates"] if query.get("filter") else []
        return [row for row in rows if all(self.matches(row, predicate) for predicate in predicates)]

    def matches(self, row: dict, predicate: dict) -> bool:
        if predicate["key"] not in FILTER_KEYS:
            raise Refused(400, f"no support for filtering on unrecognized field {predicate['key']}")
        value = row.get(predicate["key"])
        if predicate["operation"] in ("EQUALS", 1):
            return value == predicate["stringValue"]
        if predicate["operation"] in ("IN", 8):
            return value in predicate["stringValues"]["values"]
        raise Refused(400, f"operation {predicate['operation']}")

    def page(self, rows: list[dict], query: dict) -> dict:
        # Smaller pages than asked for, as a server may: the caller must follow the token.
        start = int(query.get("page_token") or 0)
        shown = [{k: v for k, v in row.items() if k != "body"} for row in rows[start : start + 2]]
        token = str(start + 2) if start + 2 < len(rows) else ""
        return {"runs": shown, "total_size": len(rows), "next_page_token": token}
