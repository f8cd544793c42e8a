"""The training step as a Kubeflow TrainJob: creates it, copies its log and ends as it ended.

The job's workers run this same step from the same share; image, nodes and command come from `pipelines.placement`, how
processes work together is the engine's. Each step's job has a name of its own, so a step that is tried again finds the
job of the try before: a running one is followed further, an ended one replaced. Workers that are lost are started again
by the runtime of `k8s/components/kubeflow-trainer`, and go on from the fit's last save.

The API server is asked by the standard library. Kubeflow's SDK (0.5) sends Python functions, which this is not, and
with pydantic, its API packages and the `kubernetes` client would bring some twenty packages into an image that has none
of them; that client alone, fifteen, for the six requests below.
"""

import argparse
import hashlib
import json
import logging
import os
import re
import shutil
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from components.runtime.errors import ContractError, PermanentError, Preempted, TemporaryError
from components.runtime.flags import run_flags
from components.runtime.kubeflow import POD_NAME, POD_UID
from components.storage.uris import local_path
from components.store.runs import StepNote, Stopped, read_notes

logger = logging.getLogger(__name__)

API_VERSION = "trainer.kubeflow.org/v1alpha1"
POLL_SECONDS = 10.0
_ASKED = "evergreen/asked"
"""Annotation with the hash of what was asked for."""
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TEMPORARY_STATUSES = (401, 408, 409, 429)
"""Beside those from 500 on: a token is rotated, and a conflict is over at the next attempt."""
_LONGEST_NAME = 45
"""Kubernetes allows 63 letters, and JobSet's pods are named `<job>-launcher-0-0-abcde`."""


class TrainJobs:
    """The TrainJobs of one namespace and their pods.

    Every method raises:
        TemporaryError: the API server does not answer, is in trouble, or does not accept the token now.
        PermanentError: it refused.
    """

    def __init__(self, url: str, namespace: str, *, account: Path = _ACCOUNT, timeout_seconds: float = 30.0) -> None:
        """`account` is the folder of a pod's token, read anew at each request, and of the server's certificates."""
        self.namespace, self._url, self._account, self._timeout = namespace, url, account, timeout_seconds
        authority = account / "ca.crt"
        tls = ssl.create_default_context(cafile=str(authority)) if authority.exists() else None
        # The server is in this cluster, never beyond the proxy that the environment may name.
        handlers = urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls)
        self._open = urllib.request.build_opener(*handlers).open
        self._jobs = f"/apis/{API_VERSION}/namespaces/{namespace}/trainjobs"

    @classmethod
    def of_this_pod(cls) -> "TrainJobs":
        """Those of the namespace that this process's pod is in.

        Raises:
            ContractError: this process is in no pod, or its pod has no token.
        """
        try:
            return cls("https://kubernetes.default.svc", (_ACCOUNT / "namespace").read_text().strip())
        except OSError as error:
            raise ContractError(f"no namespace to create a TrainJob in, expected to run in a pod: {error}") from error

    def create(self, job: dict[str, Any]) -> bool:
        """Creates the job; False where there is one of its name."""
        return self._request("POST", self._jobs, job, unless=409) is not None

    def find(self, name: str) -> dict[str, Any] | None:
        """The job; None where there is none."""
        found = self._request("GET", f"{self._jobs}/{name}", unless=404)
        return None if found is None else {"status": {}, **json.loads(found)}

    def own(self, name: str, owners: list[dict[str, Any]]) -> None:
        """Gives the job, where it is still there, these owners."""
        self._request("PATCH", f"{self._jobs}/{name}", {"metadata": {"ownerReferences": owners}}, unless=404)

    def delete(self, name: str) -> None:
        """Ends the job's pods and then removes it."""
        self._request("DELETE", f"{self._jobs}/{name}", {"propagationPolicy": "Foreground"}, unless=404)

    def pods(self, name: str) -> list[dict[str, Any]]:
        """The job's pods."""
        selector = urlencode({"labelSelector": f"jobset.sigs.k8s.io/jobset-name={name}"})
        found = self._request("GET", f"/api/v1/namespaces/{self.namespace}/pods?{selector}")
        return list(json.loads(found or b"{}").get("items", []))

    def log(self, pod: str, since: str | None) -> list[str]:
        """The lines that a pod's workers wrote since this time, each behind its own."""
        query = {"container": "node", "timestamps": "true", **({"sinceTime": since} if since else {})}
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/log?{urlencode(query)}"
        return (self._request("GET", path, unless=404) or b"").decode(errors="replace").splitlines()

    def _request(self, method: str, path: str, body: Any = None, *, unless: int | None = None) -> bytes | None:
        """The answer's content; None where the status is `unless`."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Authorization": f"Bearer {(self._account / 'token').read_text().strip()}", "Content-Type": kind}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        try:
            with self._open(request, timeout=self._timeout) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            if error.code == unless:
                return None
            temporary = error.code >= 500 or error.code in _TEMPORARY_STATUSES
            text = f"Kubernetes answered {error.code} to {method} {path}: {error.read(500).decode(errors='replace')}"
            raise (TemporaryError if temporary else PermanentError)(text) from error
        except (OSError, HTTPException) as error:
            raise TemporaryError(f"Kubernetes at {self._url} does not answer {method} {path}: {error}") from error


def train_elsewhere(
    flags: argparse.Namespace,
    note: StepNote,
    jobs: TrainJobs,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Trains as the TrainJob that `flags.train_job` describes, and takes over the model's manifest and its note.

    Raises:
        ContractError: the workers refused their input, or a job of this name is another program's.
        PermanentError: the job failed; the message has its reason, and what the workers noted.
        Preempted: SIGTERM came and the job was deleted, or its last workers were preempted.
        TemporaryError: somebody deleted the job, or the API server does not answer.
    """
    folder = local_path(flags.work) / flags.run / "train-job"
    folder.mkdir(parents=True, exist_ok=True)
    shared = {name: folder / f"{name}.json" for name in ("training_set", "output")}
    shutil.copyfile(flags.training_set, shared["training_set"])
    spec = json.loads(flags.train_job)
    spec["trainer"]["args"] = run_flags(**{**vars(flags), **shared, "train_job": ""})
    name = job_name(flags.run)
    try:
        _ensure(jobs, name, spec, sleep=sleep)
        _follow(jobs, name, sleep=sleep)
    except (Preempted, Stopped, KeyboardInterrupt):
        jobs.delete(name)
        raise
    except PermanentError as error:
        raise _as_noted(error, _note_of_workers(flags, note)) from error
    if workers := _note_of_workers(flags, note):
        note.facts = workers.facts
    shutil.copyfile(shared["output"], flags.output)
    jobs.delete(name)
    shutil.rmtree(folder)


def job_name(run: str) -> str:
    """The name of a run's TrainJob: the run's own where Kubernetes takes it, else what is left of it and a hash.

    >>> job_name("evergreen-retraining-x7k2p"), job_name("Run 7")
    ('evergreen-retraining-x7k2p', 'run-7-94d812ac')
    """
    if len(run) <= _LONGEST_NAME and re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", run):
        return run
    words = re.sub("[^a-z0-9]+", "-", run.lower()).lstrip("0123456789-")[: _LONGEST_NAME - 9].rstrip("-")
    return f"{words or 'run'}-{hashlib.sha256(run.encode()).hexdigest()[:8]}"


def _ensure(jobs: TrainJobs, name: str, spec: dict[str, Any], *, sleep: Callable[[float], None]) -> None:
    """Creates the job, unless one of an earlier try goes on or succeeded; waits until one that ends is gone."""
    asked = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()
    labels = {"app.kubernetes.io/part-of": "evergreen", "app.kubernetes.io/component": "training"}
    metadata = {"name": name, "labels": labels, "annotations": {_ASKED: asked}, "ownerReferences": _owners()}
    job = {"apiVersion": API_VERSION, "kind": "TrainJob", "metadata": metadata, "spec": spec}
    while not jobs.create(job):
        found = jobs.find(name)
        if found is None:
            continue
        theirs = found["metadata"].get("annotations", {}).get(_ASKED)
        if theirs is None:
            raise ContractError(f"TrainJob {name} is there and not of this step, expected no job of the run's name")
        if "deletionTimestamp" not in found["metadata"]:
            if theirs == asked and "Failed" not in _conditions(found):
                logger.info("TrainJob %s of an earlier try is followed further", name)
                return jobs.own(name, _owners())
            logger.info("TrainJob %s of an earlier try is replaced", name)
            jobs.delete(name)
        sleep(POLL_SECONDS)
    logger.info("TrainJob %s created in namespace %s", name, jobs.namespace)
    return None


def _owners() -> list[dict[str, Any]]:
    """The step's own pod: with it, as with a deleted run, the job goes."""
    pod, uid = os.environ.get(POD_NAME), os.environ.get(POD_UID)
    return [{"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": uid}] if pod and uid else []


def _follow(jobs: TrainJobs, name: str, *, sleep: Callable[[float], None]) -> None:
    """Returns when the job has succeeded; meanwhile copies its first worker's log to standard error."""
    log, told = _Log(jobs, name), ""
    while True:
        try:
            job = jobs.find(name)
        except TemporaryError as error:
            logger.warning("%s", error)  # a control plane may be upgraded during a fit of hours
            sleep(POLL_SECONDS)
            continue
        if job is None:
            raise TemporaryError(f"TrainJob {name} was deleted by someone; the same command goes on from the last save")
        try:
            log.copy()
        except (TemporaryError, PermanentError) as error:
            logger.warning("%s", error)
        conditions = _conditions(job)
        counts = (f"{each['active']} active, {each['failed']} failed" for each in job["status"].get("jobsStatus", []))
        if (state := "; ".join([*conditions, *counts]) or "waiting") != told:
            logger.info("TrainJob %s: %s", name, told := state)
        if failed := conditions.get("Failed"):
            raise PermanentError(f"TrainJob {name} failed, {failed['reason']}: {failed['message']}")
        if "Complete" in conditions:
            return
        sleep(POLL_SECONDS)


def _conditions(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Those that hold, by type."""
    return {each["type"]: each for each in job["status"].get("conditions", []) if each["status"] == "True"}


class _Log:
    """What the job's first worker writes, each line once, also where another pod takes its place."""

    def __init__(self, jobs: TrainJobs, name: str) -> None:
        self._jobs, self._name = jobs, name
        self._pod, self._last = "", ""

    def copy(self) -> None:
        """Copies what is new to standard error."""
        ranked = []
        for each in self._jobs.pods(self._name):
            labels = each["metadata"].get("labels", {})
            part = labels.get("jobset.sigs.k8s.io/replicatedjob-name")  # by MPI the launcher has what all write
            if labels.get("batch.kubernetes.io/job-completion-index") == "0" and each["status"]["phase"] != "Pending":
                ranked.append((part == "launcher", each["metadata"]["creationTimestamp"], each["metadata"]["name"]))
        if not ranked:
            return
        if (pod := max(ranked)[2]) != self._pod:
            logger.info("the log of TrainJob %s is that of pod %s", self._name, pod)
            self._pod, self._last = pod, ""
        for line in self._jobs.log(pod, self._last or None):
            moment, _, text = line.partition(" ")
            if moment > self._last:  # `since` is of whole seconds
                self._last = moment
                print(text, file=sys.stderr, flush=True)


def _note_of_workers(flags: argparse.Namespace, ours: StepNote) -> StepNote | None:
    """What the workers left in the store about this step; None where none of them came so far."""
    notes = read_notes(local_path(flags.store), flags.run)
    return next((each for each in notes if each.step == ours.step and each.started_at != ours.started_at), None)


def _as_noted(error: PermanentError, note: StepNote | None) -> Exception:
    """The failure of a job as its workers' step would have raised it: torchrun's exit code tells nothing of theirs."""
    text = f"{error}; the workers' last note is {note.state}: {note.reason}" if note else str(error)
    if note and note.state == "preempted":
        return Preempted(text)
    return ContractError(text) if note and note.reason.startswith(ContractError.__name__) else PermanentError(text)
