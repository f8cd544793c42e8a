"""The part of a Kubernetes API server that the training step uses: TrainJobs, their pods and logs.

The test double follows the real server's rules over real HTTP. Names of objects are unique. Until
its dependents are gone, a deleted object remains and has a deletion time. A custom resource accepts
a JSON patch or a merge patch, but no strategic merge patch. Each log line starts with its time. The
parameter `sinceSeconds` counts back from the current time. Error responses are `Status` objects.
The test double does not run a controller for TrainJobs. Tests change a job with `start_pod`,
`write`, `end` and `remove`.
"""

import json
import threading
from datetime import datetime, timedelta, timezone
from urllib.parse import parse_qs, urlsplit

from kubernetes.client import Configuration

from tests.support.http_double import HttpDouble, Reply

NAMESPACE = "kubeflow"
JOBS = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{NAMESPACE}/trainjobs"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
JOB_OF = "jobset.sigs.k8s.io/jobset-name"
START = datetime(2026, 1, 1, tzinfo=timezone.utc)
REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    409: "AlreadyExists",
    415: "UnsupportedMediaType",
    429: "TooManyRequests",
    503: "ServiceUnavailable",
}


class Answer(Exception):
    """Response with a status other than 200 or 201."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class TrainJobApi(HttpDouble):
    """A running API server. The test double calls `validate` with each created object."""

    def __init__(self, validate=lambda job: None) -> None:
        self.validate = validate
        self.jobs: dict[str, dict] = {}
        self.pods: dict[str, dict] = {}
        self.logs: dict[str, list[tuple[datetime, str]]] = {}
        self.permissions: set[tuple[str, str]] = set()
        """Verbs and resources of the requests, in the terms of RBAC rules."""
        self.failures: list[int] = []
        """Statuses of the next answers. Later responses are normal."""
        self.lingers = False
        """Whether a deleted job stays until the test removes it."""
        self.made = 0
        self.now = 0.0
        """Seconds since `START`."""
        self.silence, self.release = threading.Event(), threading.Event()
        """While `silence` is set, the server accepts requests but does not respond until `release`
        is set."""
        super().__init__()

    def close(self) -> None:
        self.release.set()
        super().close()

    def configuration(self, token: str = "the token") -> Configuration:
        """Return the client configuration for this server."""
        made = Configuration()
        made.host, made.api_key = self.url, {"authorization": f"bearer {token}"}
        return made

    def answer(self, method, path, body, headers) -> Reply | None:
        if self.silence.is_set():
            self.release.wait(30)
            return None
        try:
            if headers.get("Authorization", "").lower() != "bearer the token":
                raise Answer(401)
            if self.failures:
                raise Answer(self.failures.pop(0))
            return self.reply(
                method, path, json.loads(body or b"null"), headers.get("Content-Type")
            )
        except Answer as other:
            status = {
                "kind": "Status",
                "apiVersion": "v1",
                "metadata": {},
                "status": "Failure",
                "code": other.status,
            }
            status |= {"reason": REASONS[other.status], "message": "as the test says"}
            return as_json(status, other.status)

    def reply(self, method, path, body, kind) -> Reply:
        url = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if url.path.startswith(JOBS):
            verb = {"POST": "create", "GET": "get", "PATCH": "patch", "DELETE": "delete"}[method]
            self.permissions.add((verb, "trainjobs"))
            if verb == "patch" and kind not in (
                "application/merge-patch+json",
                "application/json-patch+json",
            ):
                raise Answer(415)
            job = self._job(verb, url.path.removeprefix(JOBS).lstrip("/"), body, query)
            return as_json(job, 201 if verb == "create" else 200)
        assert (method, url.path[: len(PODS)]) == ("GET", PODS)
        name = url.path.removeprefix(PODS).removesuffix("/log").lstrip("/")
        self.permissions.add(("get", "pods/log") if name else ("list", "pods"))
        if not name:
            job = query["labelSelector"].removeprefix(f"{JOB_OF}=")
            mine = [pod for pod in self.pods.values() if pod["metadata"]["labels"][JOB_OF] == job]
            return as_json(
                {
                    "kind": "PodList",
                    "apiVersion": "v1",
                    "metadata": {"resourceVersion": "7"},
                    "items": mine,
                }
            )
        if name not in self.pods:
            raise Answer(404)
        if self.pods[name]["status"]["phase"] == "Pending":
            raise Answer(400)
        assert (query["timestamps"], query["container"]) == ("True", "node")
        if int(query.get("sinceSeconds", 1)) < 1:
            raise Answer(400)
        first = START + timedelta(seconds=self.now - int(query.get("sinceSeconds", 10**9)))
        lines = [
            f"{moment:%Y-%m-%dT%H:%M:%S}.{i:09}Z {line}\n"
            for i, (moment, line) in enumerate(self.logs[name])
            if moment >= first
        ]
        return Reply("".join(lines).encode("latin-1"), headers={"Content-Type": "text/plain"})

    def _job(self, verb, name, body, query):
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
            assert query == {"propagationPolicy": "Foreground"}
            job["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            if not self.lingers:
                del self.jobs[name]
        return job

    def start_pod(self, job, name, *, part="node", index="0", phase="Running") -> None:
        labels = {JOB_OF: job, "jobset.sigs.k8s.io/replicatedjob-name": part}
        labels["batch.kubernetes.io/job-completion-index"] = index
        metadata = {
            "name": name,
            "labels": labels,
            "creationTimestamp": f"2026-01-01T00:00:{len(self.pods):02}Z",
        }
        spec = {"containers": [{"name": "node", "image": "evergreen-training"}]}
        self.pods[name] = {"metadata": metadata, "spec": spec, "status": {"phase": phase}}
        self.logs[name] = []
        counts = {
            "name": part,
            "ready": 0,
            "succeeded": 0,
            "failed": 0,
            "active": 1,
            "suspended": 0,
        }
        self.jobs[job]["status"] = {"jobsStatus": [counts]}

    def write(self, pod, *lines) -> None:
        """Append lines with the current time to the pod's log."""
        self.logs[pod] += [(START + timedelta(seconds=self.now), line) for line in lines]

    def end(self, job, kind, reason="JobsCompleted", message="") -> None:
        """End the job as `Complete` or `Failed`."""
        condition = {"type": kind, "status": "True", "reason": reason, "message": message}
        self.jobs[job].setdefault("status", {})["conditions"] = [condition]


def as_json(document, status=200) -> Reply:
    return Reply(json.dumps(document).encode(), status, {"Content-Type": "application/json"})
