"""The part of a Kubernetes API server that the training step asks: TrainJobs, their pods and logs, over real HTTP.

It keeps the real server's rules: a name is taken once, a deletion with dependents leaves the object with a time of
deletion until they are gone, log lines carry their time and `sinceTime` is cut to whole seconds. It runs no controller:
what happens to a job is the test's to do, by `start_pod`, `write`, `end` and `remove`.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

NAMESPACE = "kubeflow"
JOBS = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{NAMESPACE}/trainjobs"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"


class Answer(Exception):
    """Another answer than 200."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class TrainJobApi:
    """`account` becomes the folder of a pod's token; `validate` judges each object that is created."""

    def __init__(self, account, validate) -> None:
        account.mkdir()
        (account / "token").write_text("the token\n")
        self.account, self.validate = account, validate
        self.jobs: dict[str, dict] = {}
        self.pods: dict[str, dict] = {}
        self.logs: dict[str, list[str]] = {}
        self.asked: set[tuple[str, str]] = set()
        """Verbs and resources, as rights name them."""
        self.failures: list[int] = []
        """Statuses of the next answers, before any are right again."""
        self.lingers = False
        """Whether a deleted job stays until the test removes it."""
        self.made = 0
        self._seconds = 0
        double = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                try:
                    if self.headers["Authorization"] != "Bearer the token":
                        raise Answer(401)
                    if double.failures:
                        raise Answer(double.failures.pop(0))
                    status, content = 200, double.reply(self.command, self.path, json.loads(body or b"null"))
                except Answer as other:
                    status, content = other.status, json.dumps({"message": "as the test says"})
                self.send_response(status)
                self.send_header("Content-Length", str(len(content.encode())))
                self.end_headers()
                self.wfile.write(content.encode())

            do_GET = do_POST = do_PATCH = do_DELETE = answer

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def reply(self, method, path, body) -> str:
        url = urlsplit(path)
        if url.path.startswith(JOBS):
            verb = {"POST": "create", "GET": "get", "PATCH": "patch", "DELETE": "delete"}[method]
            self.asked.add((verb, "trainjobs"))
            return json.dumps(self._job(verb, url.path.removeprefix(JOBS).lstrip("/"), body))
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        name = url.path.removeprefix(PODS).removesuffix("/log").lstrip("/")
        self.asked.add(("get", "pods/log") if name else ("list", "pods"))
        if not name:
            job = query["labelSelector"].removeprefix("jobset.sigs.k8s.io/jobset-name=")
            mine = [pod for pod in self.pods.values() if pod["metadata"]["labels"][JOB_OF] == job]
            return json.dumps({"items": mine})
        if self.pods[name]["status"]["phase"] == "Pending":
            raise Answer(400)
        assert (query["timestamps"], query["container"]) == ("true", "node")
        since = query.get("sinceTime", "")[:19]
        return "".join(f"{line}\n" for line in self.logs[name] if line[:19] >= since)

    def _job(self, verb, name, body):
        if verb == "create":
            self.validate(body)
            name = body["metadata"]["name"]
            if name in self.jobs:
                raise Answer(409)
            self.made += 1
            self.jobs[name] = body
        if name not in self.jobs:
            raise Answer(404)
        job = self.jobs[name]
        if verb == "patch":
            job["metadata"] |= body["metadata"]
        if verb == "delete":
            assert body == {"propagationPolicy": "Foreground"}
            job["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            if not self.lingers:
                del self.jobs[name]
        return job

    def start_pod(self, job, name, *, part="node", index="0", phase="Running") -> None:
        self._seconds += 1
        labels = {JOB_OF: job, "jobset.sigs.k8s.io/replicatedjob-name": part}
        labels["batch.kubernetes.io/job-completion-index"] = index
        metadata = {"name": name, "labels": labels, "creationTimestamp": f"2026-01-01T00:00:{self._seconds:02}Z"}
        self.pods[name] = {"metadata": metadata, "status": {"phase": phase}}
        self.logs[name] = []
        counts = {"name": part, "ready": 0, "succeeded": 0, "failed": 0, "active": 1, "suspended": 0}
        self.jobs[job]["status"] = {"jobsStatus": [counts]}

    def write(self, pod, *lines) -> None:
        """Lets the pod write lines, all in one second."""
        written = self.logs[pod]
        for line in lines:
            written.append(f"2026-01-01T00:01:00.{len(written):09}Z {line}")

    def end(self, job, kind, reason="JobsCompleted", message="") -> None:
        """Ends the job as `Complete` or `Failed`."""
        condition = {"type": kind, "status": "True", "reason": reason, "message": message}
        self.jobs[job].setdefault("status", {})["conditions"] = [condition]


JOB_OF = "jobset.sigs.k8s.io/jobset-name"
