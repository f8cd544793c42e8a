"""The training step as a Kubeflow TrainJob: creates it, copies its log and ends as it ended.

The job's workers run this same step from the same share; image, nodes and command come from `pipelines.placement`, how
processes work together is the engine's. Each step's job has a name of its own, so a step that is tried again finds the
job of the try before: a running one is followed further, an ended one replaced. Workers that are lost are started again
by the runtime of `k8s/components/kubeflow-trainer`, and go on from the fit's last save.

Kubernetes is asked by its own client. Kubeflow's SDK (0.5) sends Python functions, which this is not.
"""

import argparse
import hashlib
import json
import logging
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from evergreen.registry.runs import StepNote, Stopped, read_notes
from evergreen.runtime.errors import ContractError, PermanentError, Preempted, TemporaryError
from evergreen.runtime.flags import run_flags
from evergreen.runtime.kubeflow import POD_NAME, POD_UID
from evergreen.storage.uris import local_path

logger = logging.getLogger(__name__)

_GROUP, _VERSION = "trainer.kubeflow.org", "v1alpha1"
POLL_SECONDS = 10.0
_ASKED = "evergreen/asked"
"""Annotation with the hash of what was asked for."""
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""The client reads token and certificates beside it, but not the namespace."""
_LOG_OVERLAP_SECONDS = 60
"""How far a look at a log goes back before the last one, longer than a request takes."""
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

    def __init__(
        self,
        configuration: client.Configuration,
        namespace: str,
        *,
        timeout_seconds: tuple[float, float] = (5.0, 30.0),
    ) -> None:
        """Ask nobody yet.

        Args:
            configuration: Address, token and certificates of the API server.
            namespace: Namespace of the jobs.
            timeout_seconds: To connect and to read, of each request.
        """
        # The server is in this cluster, never beyond the proxy that the environment may name.
        configuration.proxy = None
        # A request that failed is repeated by the caller, which waits in between.
        configuration.retries = 0
        configuration.client_side_validation = False
        connection = client.ApiClient(configuration)
        self._core, self._custom = client.CoreV1Api(connection), client.CustomObjectsApi(connection)
        self.namespace, self._host, self._timeout = namespace, configuration.host, timeout_seconds
        self._jobs = {"group": _GROUP, "version": _VERSION, "namespace": namespace, "plural": "trainjobs"}

    @classmethod
    def of_this_pod(cls) -> "TrainJobs":
        """Return those of the namespace that this process's pod is in.

        Raises:
            ContractError: this process is in no pod, or its pod has no token.
        """
        configuration = client.Configuration()
        try:
            config.load_incluster_config(configuration)
            return cls(configuration, _NAMESPACE_FILE.read_text().strip())
        except (config.ConfigException, OSError) as error:
            raise ContractError(f"no namespace to create a TrainJob in, expected to run in a pod: {error}") from error

    def create(self, job: dict[str, Any]) -> bool:
        """Create the job, or return False if there is one of its name."""
        create = self._custom.create_namespaced_custom_object
        return self._request(create, **self._jobs, body=job, unless=409) is not None

    def find(self, name: str) -> dict[str, Any] | None:
        """Return the job, or None if there is none."""
        found = self._request(self._custom.get_namespaced_custom_object, **self._jobs, name=name, unless=404)
        return None if found is None else {"status": {}, **found}

    def own(self, name: str, owners: list[dict[str, Any]]) -> None:
        """Give the job these owners, if it is still there."""
        change = {"metadata": {"ownerReferences": owners}}
        patch = self._custom.patch_namespaced_custom_object
        self._request(patch, **self._jobs, name=name, body=change, unless=404)

    def delete(self, name: str) -> None:
        """End the job's pods and then remove it."""
        delete = self._custom.delete_namespaced_custom_object
        self._request(delete, **self._jobs, name=name, propagation_policy="Foreground", unless=404)

    def pods(self, name: str) -> list[Any]:
        """Return the job's pods, as the client's `V1Pod`."""
        selector = f"jobset.sigs.k8s.io/jobset-name={name}"
        listed = self._core.list_namespaced_pod
        return list(self._request(listed, namespace=self.namespace, label_selector=selector).items)

    def log(self, pod: str, since_seconds: int | None) -> list[str]:
        """Return the lines that a pod's workers wrote in the last seconds, each behind its time.

        Args:
            pod: Name of the pod.
            since_seconds: How far to go back, at least 1; None = all lines.
        """
        asked = {"name": pod, "namespace": self.namespace, "container": "node", "timestamps": True}
        since = {"since_seconds": since_seconds} if since_seconds else {}

        def read(**given: Any) -> bytes:
            # As bytes: the client fails on a log that is not UTF-8.
            return bytes(self._core.read_namespaced_pod_log(**given, _preload_content=False).data)

        return (self._request(read, **asked, **since, unless=404) or b"").decode(errors="replace").splitlines()

    def _request(self, call: Callable[..., Any], *, unless: int | None = None, **given: Any) -> Any:
        """Return what the client's method returns, or None if the answer's status is `unless`."""
        action = f"{call.__name__} {given.get('name', '')}".strip()
        try:
            return call(**given, _request_timeout=self._timeout)
        except ApiException as error:
            if error.status == unless:
                return None
            # The client reports a failed TLS handshake as status 0.
            temporary = not error.status or error.status >= 500 or error.status in _TEMPORARY_STATUSES
            text = f"Kubernetes answered {error.status} {error.reason} to {action}: {str(error.body)[:500]}"
            raise (TemporaryError if temporary else PermanentError)(text) from error
        except (HTTPError, OSError) as error:
            raise TemporaryError(f"Kubernetes at {self._host} does not answer {action}: {error}") from error


def train_elsewhere(
    flags: argparse.Namespace,
    note: StepNote,
    jobs: TrainJobs,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Train as the TrainJob that `flags.train_job` describes, and take over the model's manifest and its note.

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
        _follow(jobs, name, sleep=sleep, clock=clock)
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
    """Return the name of a run's TrainJob: the run's own if Kubernetes allows it, else its letters and a hash.

    >>> job_name("evergreen-retraining-x7k2p"), job_name("Run 7")
    ('evergreen-retraining-x7k2p', 'run-7-94d812ac')
    """
    if len(run) <= _LONGEST_NAME and re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", run):
        return run
    words = re.sub("[^a-z0-9]+", "-", run.lower()).lstrip("0123456789-")[: _LONGEST_NAME - 9].rstrip("-")
    return f"{words or 'run'}-{hashlib.sha256(run.encode()).hexdigest()[:8]}"


def build_job(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Return the TrainJob that is created."""
    asked = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()
    labels = {"app.kubernetes.io/part-of": "evergreen", "app.kubernetes.io/component": "training"}
    metadata = {"name": name, "labels": labels, "annotations": {_ASKED: asked}, "ownerReferences": _owners()}
    return {"apiVersion": f"{_GROUP}/{_VERSION}", "kind": "TrainJob", "metadata": metadata, "spec": spec}


def _ensure(jobs: TrainJobs, name: str, spec: dict[str, Any], *, sleep: Callable[[float], None]) -> None:
    """Create the job, unless one of an earlier try runs or succeeded, and wait until one that ends is gone."""
    job = build_job(name, spec)
    asked = job["metadata"]["annotations"][_ASKED]
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
    """Return the step's own pod as the owner, so that the job is deleted with it and with a deleted run."""
    pod, uid = os.environ.get(POD_NAME), os.environ.get(POD_UID)
    return [{"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": uid}] if pod and uid else []


def _follow(jobs: TrainJobs, name: str, *, sleep: Callable[[float], None], clock: Callable[[], float]) -> None:
    """Copy the log of the job's first worker to standard error until the job has succeeded."""
    log, told = _Log(jobs, name, clock), ""
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
    """Return the conditions that are true, by type."""
    return {each["type"]: each for each in job["status"].get("conditions", []) if each["status"] == "True"}


class _Log:
    """Log of the job's first worker, each line once, also if another pod replaces it."""

    def __init__(self, jobs: TrainJobs, name: str, clock: Callable[[], float]) -> None:
        self._jobs, self._name, self._clock = jobs, name, clock
        self._pod, self._last = "", ""
        self._looked = 0.0
        """Time of the last read of the log, by `clock`."""

    def copy(self) -> None:
        """Copy new lines to standard error."""
        ranked = []
        for each in self._jobs.pods(self._name):
            labels, made = each.metadata.labels or {}, each.metadata.creation_timestamp
            part = labels.get("jobset.sigs.k8s.io/replicatedjob-name")  # by MPI the launcher has what all write
            if labels.get("batch.kubernetes.io/job-completion-index") == "0" and each.status.phase != "Pending":
                ranked.append((part == "launcher", made, each.metadata.name))
        if not ranked:
            return
        if (pod := max(ranked)[2]) != self._pod:
            logger.info("the log of TrainJob %s is that of pod %s", self._name, pod)
            self._pod, self._last = pod, ""
        now = self._clock()
        since = math.ceil(now - self._looked) + _LOG_OVERLAP_SECONDS if self._last else None
        for line in self._jobs.log(pod, since):
            moment, _, text = line.partition(" ")
            if moment > self._last:
                self._last = moment
                print(text, file=sys.stderr, flush=True)
        self._looked = now


def _note_of_workers(flags: argparse.Namespace, ours: StepNote) -> StepNote | None:
    """Return the workers' note of this step, or None if no worker wrote one."""
    notes = read_notes(local_path(flags.store), flags.run)
    return next((each for each in notes if each.step == ours.step and each.started_at != ours.started_at), None)


def _as_noted(error: PermanentError, note: StepNote | None) -> Exception:
    """Return a job's failure as its workers' step raised it, which torchrun's exit code does not tell."""
    text = f"{error}; the workers' last note is {note.state}: {note.reason}" if note else str(error)
    if note and note.state == "preempted":
        return Preempted(text)
    return ContractError(text) if note and note.reason.startswith(ContractError.__name__) else PermanentError(text)
