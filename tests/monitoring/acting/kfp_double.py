"""A KFP API server for tests: real HTTP, experiments and runs in memory, the server's own filter rules.

What the real server does and this does not: authorization, validation of the pipeline, MySQL's collation.
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
        self.versions: list[dict] = []
        self.requests: list[tuple[str, str]] = []
        self.failure: int | None = None
        self.silence = threading.Event()  # set: accept and never answer
        self.release = threading.Event()
        double = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer("GET")

            def do_POST(self):
                self.answer("POST")

            def answer(self, method):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if double.silence.is_set():
                    double.release.wait(30)
                    return
                try:
                    status, document = 200, double.reply(method, self.path, body)
                except Refused as refused:
                    status, document = refused.status, {"error": str(refused)}
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
            "created_at": f"2026-01-01T00:00:{len(self.runs):02d}Z",
        }
        self.runs.append(run)
        return run

    def reply(self, method: str, target: str, body: bytes) -> dict:
        parts = urlsplit(target)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        self.requests.append((method, parts.path))
        if self.failure is not None:
            raise Refused(self.failure, "as the test says")
        if "namespace" in query or (body and json.loads(body).get("namespace")):
            raise Refused(400, "in single-user mode a request shouldn't contain a namespace")
        path = parts.path.removeprefix("/apis/v2beta1/")
        if (method, path) == ("GET", "experiments"):
            return {"experiments": self.select(self.experiments, query)}
        if (method, path) == ("POST", "experiments"):
            new = {"experiment_id": f"e{len(self.experiments) + 1}", **json.loads(body)}
            self.experiments.append(new)
            return new
        if (method, path) == ("GET", "runs"):
            in_scope = [run for run in self.runs if run["experiment_id"] == query.get("experiment_id")]
            return self.page(self.select(in_scope, query), query)
        if (method, path) == ("POST", "runs"):
            return self.create_run(json.loads(body))
        if method == "GET" and re.fullmatch(r"pipelines/[^/]+/versions", path):
            return {"pipeline_versions": self.versions}
        raise Refused(404, f"{method} {path}")

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
