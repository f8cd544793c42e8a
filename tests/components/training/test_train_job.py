"""Tests of the training image's `kubernetes` client against an API server's rules.

tests/k8s/test_train_job.py tests how the step handles a job, with the older client that kfp
requires.
"""

import kubernetes
import pytest

from components.training.train_job import TrainJobs, build_job
from evergreen.runtime.errors import PermanentError, TemporaryError
from testing.paths import REPOSITORY
from tests.support.errors import raises
from tests.support.train_job_api import NAMESPACE, TrainJobApi

RUN = "evergreen-retraining-x7k2p"


@pytest.fixture
def api():
    double = TrainJobApi()
    yield double
    double.close()


def test_environment_has_client_that_images_have():
    locked = f"kubernetes=={kubernetes.__version__}"
    for name in ("training.lock", "merlin-training.txt"):
        assert locked in (REPOSITORY / "requirements" / name).read_text()


def test_job_is_created_once_owned_followed_and_deleted(api):
    jobs = TrainJobs(api.configuration(), NAMESPACE)
    job = build_job(RUN, {"trainer": {"numNodes": 1}})
    assert (jobs.create(job), jobs.create(job), jobs.pods(RUN)) == (True, False, [])
    jobs.own(RUN, [{"apiVersion": "v1", "kind": "Pod", "name": "step", "uid": "u"}])
    found = jobs.find(RUN)
    assert [each["uid"] for each in found["metadata"]["ownerReferences"]] == ["u"]
    assert (found["spec"], found["status"]) == (job["spec"], {})
    api.start_pod(RUN, "worker-a")
    api.write("worker-a", "one")
    api.now += 100.0
    api.write("worker-a", '{"loss": 0.5}')
    (pod,) = jobs.pods(RUN)
    assert (pod.metadata.name, pod.status.phase) == ("worker-a", "Running")
    assert [line.partition(" ")[2] for line in jobs.log("worker-a", None)] == [
        "one",
        '{"loss": 0.5}',
    ]
    assert [line.partition(" ")[2] for line in jobs.log("worker-a", 60)] == ['{"loss": 0.5}']
    jobs.delete(RUN)
    jobs.delete(RUN)
    jobs.own(RUN, [])
    assert (jobs.find(RUN), jobs.log("worker-z", None)) == (None, [])


@pytest.mark.parametrize(
    ("status", "error"),
    [(503, TemporaryError), (429, TemporaryError), (401, TemporaryError), (403, PermanentError)],
)
def test_refusal_is_distinguished_from_temporary_error(api, status, error):
    api.failures.append(status)
    with raises(error, status, f"get_namespaced_custom_object {RUN}", "as the test says"):
        TrainJobs(api.configuration(), NAMESPACE).find(RUN)
