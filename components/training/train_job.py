"""Run the training step as a Kubeflow TrainJob: create it, copy its log and end with its result.

The job's workers run this same step on the same shared volume. `pipelines.placement` sets image,
nodes and command, and the engine coordinates the processes. The job of a step has a fixed name, so
a retried step finds the job of its earlier try. A retried step continues to follow a running job,
and replaces a failed job. The runtime of `k8s/components/kubeflow-trainer` restarts lost workers,
which continue from the last save of the fit.

This module uses the Kubernetes client, because Kubeflow's SDK (0.5) can only send Python functions.
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
_POLL_SECONDS = 10.0
_SPEC_HASH = "evergreen/asked"
"""Annotation with the hash of the requested spec."""
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""File with the pod's namespace. The Kubernetes client does not read this file. The token and the
certificates are in the same folder."""
_LOG_OVERLAP_SECONDS = 60
"""Overlap of two consecutive reads of a log. A read takes less time than this overlap, so no line
is missed."""
_TEMPORARY_STATUSES = (401, 408, 409, 429)
"""HTTP statuses below 500 after which a retry can help. Examples are a token that is being rotated,
and a conflict between two requests."""
_MAX_NAME_LENGTH = 45
"""Kubernetes allows 63 characters, and JobSet names its pods `<job>-launcher-0-0-abcde`."""


class TrainJobs:
    """The TrainJobs of one namespace and their pods.

    Errors of every method: TemporaryError: the API server does not answer, reports an internal
    error, or temporarily rejects the token. PermanentError: the API server rejected the request.
    """

    def __init__(
        self,
        configuration: client.Configuration,
        namespace: str,
        *,
        timeout_seconds: tuple[float, float] = (5.0, 30.0),
    ) -> None:
        """Create the client without connecting.

        Args:
            configuration: Address, token and certificates of the API server.
            namespace: Namespace of the jobs.
            timeout_seconds: Timeouts of each request in seconds: to connect, and to read.
        """
        # The API server is in this cluster, so a proxy from the environment must not be used.
        configuration.proxy = None
        # The caller repeats failed requests, with pauses in between.
        configuration.retries = 0
        configuration.client_side_validation = False
        connection = client.ApiClient(configuration)
        self._core, self._custom = client.CoreV1Api(connection), client.CustomObjectsApi(connection)
        self.namespace, self._host, self._timeout = namespace, configuration.host, timeout_seconds
        self._jobs = {
            "group": _GROUP,
            "version": _VERSION,
            "namespace": namespace,
            "plural": "trainjobs",
        }

    @classmethod
    def of_this_pod(cls) -> "TrainJobs":
        """Return the jobs of the namespace of this process's pod.

        Raises:
            ContractError: this process does not run in a pod, or its pod has no token.
        """
        configuration = client.Configuration()
        try:
            config.load_incluster_config(configuration)
            return cls(configuration, _NAMESPACE_FILE.read_text().strip())
        except (config.ConfigException, OSError) as error:
            raise ContractError(
                f"this process has no namespace for a TrainJob, expected to run in a pod: {error}"
            ) from error

    def create(self, job: dict[str, Any]) -> bool:
        """Create the job, or return False if a job with its name exists."""
        create = self._custom.create_namespaced_custom_object
        return self._request(create, **self._jobs, body=job, unless=409) is not None

    def find(self, name: str) -> dict[str, Any] | None:
        """Return the job, or None if there is none."""
        found = self._request(
            self._custom.get_namespaced_custom_object, **self._jobs, name=name, unless=404
        )
        return None if found is None else {"status": {}, **found}

    def own(self, name: str, owners: list[dict[str, Any]]) -> None:
        """Set the owners of the job, if it still exists."""
        change = {"metadata": {"ownerReferences": owners}}
        patch = self._custom.patch_namespaced_custom_object
        self._request(patch, **self._jobs, name=name, body=change, unless=404)

    def delete(self, name: str) -> None:
        """Delete the job. Kubernetes deletes the job's pods first."""
        delete = self._custom.delete_namespaced_custom_object
        self._request(delete, **self._jobs, name=name, propagation_policy="Foreground", unless=404)

    def pods(self, name: str) -> list[Any]:
        """Return the job's pods, as the client's `V1Pod`."""
        selector = f"jobset.sigs.k8s.io/jobset-name={name}"
        listed = self._core.list_namespaced_pod
        return list(self._request(listed, namespace=self.namespace, label_selector=selector).items)

    def log(self, pod: str, since_seconds: int | None) -> list[str]:
        """Return the lines that a pod's workers wrote recently, each prefixed with its time.

        Args:
            pod: Name of the pod.
            since_seconds: Seconds to go back, at least 1. If None, all lines are returned.
        """
        requested = {
            "name": pod,
            "namespace": self.namespace,
            "container": "node",
            "timestamps": True,
        }
        since = {"since_seconds": since_seconds} if since_seconds else {}

        def read(**given: Any) -> bytes:
            # Read bytes, because the client fails on a log that is not UTF-8.
            return bytes(self._core.read_namespaced_pod_log(**given, _preload_content=False).data)

        return (
            (self._request(read, **requested, **since, unless=404) or b"")
            .decode(errors="replace")
            .splitlines()
        )

    def _request(self, call: Callable[..., Any], *, unless: int | None = None, **given: Any) -> Any:
        """Return the result of the client's method.

        Args:
            call: Method of the Kubernetes client.
            unless: HTTP status of a response for which the result is None, for example 404.
            given: Arguments of the method.
        """
        action = f"{call.__name__} {given.get('name', '')}".strip()
        try:
            return call(**given, _request_timeout=self._timeout)
        except ApiException as error:
            if error.status == unless:
                return None
            # The client reports a failed TLS handshake as status 0.
            temporary = (
                not error.status or error.status >= 500 or error.status in _TEMPORARY_STATUSES
            )
            answer = f"{error.status} {error.reason} to {action}: {str(error.body)[:500]}"
            text = f"Kubernetes answered {answer}"
            raise (TemporaryError if temporary else PermanentError)(text) from error
        except (HTTPError, OSError) as error:
            raise TemporaryError(
                f"Kubernetes at {self._host} does not answer {action}: {error}"
            ) from error


def train_elsewhere(
    flags: argparse.Namespace,
    note: StepNote,
    jobs: TrainJobs,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Train in the TrainJob that `flags.train_job` describes.

    The step copies the workers' model manifest and the facts of their note.

    Raises:
        ContractError: the workers rejected their input, or another program created a job with this
            name.
        PermanentError: the job failed. The message contains the job's reason and the workers' note.
        Preempted: SIGTERM arrived and the job was deleted, or its last workers were preempted.
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
        raise _as_reported(error, _note_of_workers(flags, note)) from error
    if workers := _note_of_workers(flags, note):
        note.facts = workers.facts
    shutil.copyfile(shared["output"], flags.output)
    jobs.delete(name)
    shutil.rmtree(folder)


def job_name(run: str) -> str:
    """Return the name of a run's TrainJob.

    If Kubernetes allows the run's name, the job has the same name. If Kubernetes does not allow the
    run's name, the job's name consists of the allowed characters of the run's name and a hash.

    >>> job_name("evergreen-retraining-x7k2p"), job_name("Run 7")
    ('evergreen-retraining-x7k2p', 'run-7-94d812ac')
    """
    if len(run) <= _MAX_NAME_LENGTH and re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", run):
        return run
    words = (
        re.sub("[^a-z0-9]+", "-", run.lower())
        .lstrip("0123456789-")[: _MAX_NAME_LENGTH - 9]
        .rstrip("-")
    )
    return f"{words or 'run'}-{hashlib.sha256(run.encode()).hexdigest()[:8]}"


def build_job(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Return the TrainJob to create."""
    requested = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()
    labels = {"app.kubernetes.io/part-of": "evergreen", "app.kubernetes.io/component": "training"}
    metadata = {
        "name": name,
        "labels": labels,
        "annotations": {_SPEC_HASH: requested},
        "ownerReferences": _owners(),
    }
    return {
        "apiVersion": f"{_GROUP}/{_VERSION}",
        "kind": "TrainJob",
        "metadata": metadata,
        "spec": spec,
    }


def _ensure(
    jobs: TrainJobs, name: str, spec: dict[str, Any], *, sleep: Callable[[float], None]
) -> None:
    """Create the job, unless a job of an earlier try runs or has succeeded.

    A job that has failed or has another spec is deleted first. The function waits until the
    deletion is complete.
    """
    job = build_job(name, spec)
    requested = job["metadata"]["annotations"][_SPEC_HASH]
    while not jobs.create(job):
        found = jobs.find(name)
        if found is None:
            continue
        theirs = found["metadata"].get("annotations", {}).get(_SPEC_HASH)
        if theirs is None:
            raise ContractError(
                f"TrainJob {name} exists and was not created by this step, expected no job with "
                "the run's name"
            )
        if "deletionTimestamp" not in found["metadata"]:
            if theirs == requested and "Failed" not in _conditions(found):
                logger.info(
                    "TrainJob %s of an earlier try still runs or has succeeded: following it", name
                )
                return jobs.own(name, _owners())
            logger.info("replacing TrainJob %s of an earlier try", name)
            jobs.delete(name)
        sleep(_POLL_SECONDS)
    logger.info("TrainJob %s created in namespace %s", name, jobs.namespace)
    return None


def _owners() -> list[dict[str, Any]]:
    """Return the step's pod as the owner, so that deleting the pod or its run deletes the job."""
    pod, uid = os.environ.get(POD_NAME), os.environ.get(POD_UID)
    return [{"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": uid}] if pod and uid else []


def _follow(
    jobs: TrainJobs, name: str, *, sleep: Callable[[float], None], clock: Callable[[], float]
) -> None:
    """Copy the log of the job's first worker to standard error until the job has succeeded."""
    log, reported = _Log(jobs, name, clock), ""
    while True:
        try:
            job = jobs.find(name)
        except TemporaryError as error:
            logger.warning(
                "%s", error
            )  # the control plane may be upgraded during a fit, which can take hours
            sleep(_POLL_SECONDS)
            continue
        if job is None:
            raise TemporaryError(
                f"TrainJob {name} was deleted by someone; the same command continues from the last "
                "save"
            )
        try:
            log.copy()
        except (TemporaryError, PermanentError) as error:
            logger.warning("%s", error)
        conditions = _conditions(job)
        counts = (
            f"{each['active']} active, {each['failed']} failed"
            for each in job["status"].get("jobsStatus", [])
        )
        if (state := "; ".join([*conditions, *counts]) or "waiting") != reported:
            logger.info("TrainJob %s: %s", name, reported := state)
        if failed := conditions.get("Failed"):
            raise PermanentError(f"TrainJob {name} failed, {failed['reason']}: {failed['message']}")
        if "Complete" in conditions:
            return
        sleep(_POLL_SECONDS)


def _conditions(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the job's conditions whose status is true, by type."""
    return {
        each["type"]: each
        for each in job["status"].get("conditions", [])
        if each["status"] == "True"
    }


class _Log:
    """Log of the job's first worker.

    Each line is copied once, even if another pod replaces the worker's pod.
    """

    def __init__(self, jobs: TrainJobs, name: str, clock: Callable[[], float]) -> None:
        self._jobs, self._name, self._clock = jobs, name, clock
        self._pod, self._last = "", ""
        self._read_at = 0.0
        """Time of the last read of the log, from `clock`."""

    def copy(self) -> None:
        """Copy new lines to standard error."""
        ranked = []
        for each in self._jobs.pods(self._name):
            labels, made = each.metadata.labels or {}, each.metadata.creation_timestamp
            # With MPI, the launcher's log has the output of all workers.
            part = labels.get("jobset.sigs.k8s.io/replicatedjob-name")
            if (
                labels.get("batch.kubernetes.io/job-completion-index") == "0"
                and each.status.phase != "Pending"
            ):
                ranked.append((part == "launcher", made, each.metadata.name))
        if not ranked:
            return
        if (pod := max(ranked)[2]) != self._pod:
            logger.info("following the log of pod %s of TrainJob %s", pod, self._name)
            self._pod, self._last = pod, ""
        now = self._clock()
        since = math.ceil(now - self._read_at) + _LOG_OVERLAP_SECONDS if self._last else None
        for line in self._jobs.log(pod, since):
            moment, _, text = line.partition(" ")
            if moment > self._last:
                self._last = moment
                print(text, file=sys.stderr, flush=True)
        self._read_at = now


def _note_of_workers(flags: argparse.Namespace, ours: StepNote) -> StepNote | None:
    """Return the workers' note of this step, or None if no worker wrote one."""
    notes = read_notes(local_path(flags.store), flags.run)
    return next(
        (each for each in notes if each.step == ours.step and each.started_at != ours.started_at),
        None,
    )


def _as_reported(error: PermanentError, note: StepNote | None) -> Exception:
    """Return a job's failure as the error that the workers' step raised.

    The exit code of torchrun does not identify this error.
    """
    text = (
        f"{error}; last note of the workers: {note.state} {note.reason}".rstrip()
        if note
        else str(error)
    )
    if note and note.state == "preempted":
        return Preempted(text)
    return (
        ContractError(text)
        if note and note.reason.startswith(ContractError.__name__)
        else PermanentError(text)
    )
