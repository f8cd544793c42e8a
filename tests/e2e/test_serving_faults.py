"""Tests that clients get correct answers during faults of servers, files and requests."""

import dataclasses
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from controller.rollback import rollback
from demo.triton import TritonServer, TritonSettings
from evergreen.contracts.manifests import Release
from evergreen.contracts.serving import GRPC_OPTIONS
from evergreen.registry.promotion_journal import current, read_entries
from evergreen.runtime.errors import PermanentError, TemporaryError
from evergreen.serving.repository.model_repository import ModelRepository
from evergreen.serving.repository.triton_config import ServingOptions
from evergreen.serving.servers import Triton
from evergreen.storage.uris import local_path, open_objects
from testing.processes import running_in_group, wait_for
from testing.served_names import CANDIDATE_NAME, MODEL_NAME, NAMES
from tests.support.errors import raises
from tests.support.model_repository import with_versions
from tests.support.real_servers import RetryingTraffic
from tests.support.triton import write_model
from tests.support.triton_double import Altered


@pytest.fixture
def triton(tmp_path):
    # After a stub was killed, Triton 2.51 always uses the full time that is allowed for stopping.
    settings = TritonSettings(stop_seconds=0.2)
    with TritonServer(
        tmp_path / "repository", log=tmp_path / "triton.log", settings=settings
    ) as server:
        yield server


def check_answers(answers, scores_of_version, settings):
    """Assert that every answer has its version's scores, and that the journal lists the version."""
    repository = ModelRepository(open_objects(settings.repository), NAMES)
    entries = {entry.version: entry for entry in read_entries(settings.store)}
    for version in {answer.model_version for answer in answers}:
        recorded = Release.read(local_path(entries[version].release_uri)).sha256["graph"]
        assert (
            entries[version].sha256.get("graph", recorded)
            == recorded
            == repository.published.record(version).graph_sha256
        )
        repository.published.check(version)
    for answer in answers:
        np.testing.assert_allclose(
            answer.scores, scores_of_version[answer.model_version], atol=1e-5
        )


def test_kill_9_under_load_costs_retries_but_no_request_and_no_leftovers(
    deploy, triton, settings, raw_rows, expected
):
    deploy(1)
    rows = raw_rows(8)
    with RetryingTraffic(triton.grpc_url, rows) as traffic:
        traffic.more()
        group, shm = triton.pid, f"{triton._shm_prefix}*"
        os.kill(triton.pid, signal.SIGKILL)
        wait_for(lambda: not triton.alive())
        triton.start()
        wait_for(lambda: not running_in_group(group))
        traffic.more()
    assert traffic.failures == []
    check_answers(traffic.answers, {1: expected(1, rows)}, settings)
    triton.stop()
    assert not list(Path("/dev/shm").glob(shm))


@pytest.mark.parametrize(
    "name", [CANDIDATE_NAME, MODEL_NAME], ids=["in rehearsal", "after publication"]
)
def test_kill_9_during_release_restores_version_of_journal(
    deploy, triton, settings, raw_rows, expected, name
):
    deploy(1)
    rows = raw_rows(8)

    def die(real, request):
        if request == name and triton.alive():
            triton.kill()
        real.load(request)

    with pytest.raises(TemporaryError):
        deploy(2, connect=lambda url: Altered(Triton(url), load=die))
    assert current(settings.store).version == 1
    triton.start()
    with RetryingTraffic(triton.grpc_url, rows) as traffic:
        traffic.more()
        done = deploy(3)
        traffic.more()
    assert traffic.failures == []
    assert {traffic.answers[0].model_version, traffic.answers[-1].model_version} == {
        1,
        done.version,
    }
    check_answers(
        traffic.answers, {1: expected(1, rows), done.version: expected(3, rows)}, settings
    )


def test_corrupt_live_graph_fails_start_and_offline_rollback_restores_it(
    deploy, triton, settings, raw_rows, expected
):
    deploy(1), deploy(2)
    triton.stop()
    graph = triton.repository / MODEL_NAME / "2" / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:1000])
    with raises(PermanentError, "at start", "'click_model' version 2"):
        triton.start()
    assert not triton.alive()
    rollback(dataclasses.replace(settings, triton_urls=()), reason="corrupt file")
    triton.start()
    client, rows = Triton(triton.grpc_url), raw_rows(5)
    scores, version = client.infer(MODEL_NAME, *rows)
    client.close()
    assert version == 1
    np.testing.assert_allclose(scores, expected(1, rows), atol=1e-5)


def test_corrupt_graph_on_running_server_leaves_old_version_answering(deploy, triton, raw_rows):
    deploy(1)
    model = triton.repository / MODEL_NAME
    (model / "2").mkdir()
    for file in (model / "1").iterdir():
        if file.is_file():
            (model / "2" / file.name).write_bytes(
                file.read_bytes()[: 300 if file.name == "model.onnx" else None]
            )
    config = model / "config.pbtxt"
    config.write_text(with_versions(config.read_text(), [1, 2]))
    client = Triton(triton.grpc_url)
    with raises((PermanentError, TemporaryError), "click_model", "failed"):
        client.load(MODEL_NAME)
    assert client.infer(MODEL_NAME, *raw_rows(3))[1] == 1
    client.close()


@pytest.fixture(scope="module")
def answering(tmp_path_factory):
    """A server whose model answers at once."""
    root = tmp_path_factory.mktemp("answering")
    write_model(root / "repository")
    with TritonServer(root / "repository", log=root / "triton.log") as server:
        yield server


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"dense": ("FP64", 2)}, "data-type is 'FP64', but model 'click_model' expects 'FP32'"),
        ({"dense": ("FP32", 3)}, r"unexpected shape for input 'dense'"),
        ({"categorical": ("INT32", 8)}, "INT32"),
        ({"categorical": ("INT64", 9)}, r"unexpected shape for input 'categorical'"),
        ({"dense": None}, r"expected 2 inputs but got 1"),
        ({"extra": ("FP32", 1)}, r"expected 2 inputs but got 3"),
    ],
    ids=["dtype", "width", "integer width", "too wide", "missing", "too many"],
)
def test_malformed_request_is_refused_and_next_request_is_answered(answering, tensors, message):
    import tritonclient.grpc as grpc_client
    from tritonclient.utils import InferenceServerException, triton_to_np_dtype

    form = {"dense": ("FP32", 2), "categorical": ("INT64", 8), **tensors}
    inputs = []
    for name, (datatype, width) in ((name, f) for name, f in form.items() if f):
        inputs.append(grpc_client.InferInput(name, [2, width], datatype))
        inputs[-1].set_data_from_numpy(np.zeros((2, width), triton_to_np_dtype(datatype)))
    raw = grpc_client.InferenceServerClient(answering.grpc_url, channel_args=list(GRPC_OPTIONS))
    with raw, pytest.raises(InferenceServerException, match=message) as refused:
        raw.infer(MODEL_NAME, inputs)
    assert "INVALID_ARGUMENT" in refused.value.status()
    client = Triton(answering.grpc_url)
    good = np.zeros((2, 2), np.float32), np.zeros((2, 8), np.int64)
    assert client.infer(MODEL_NAME, *good)[1] == 1
    client.close()


def write_gated_model(root, options):
    """Write a model that waits for the file `open`, and records its batch sizes."""
    work = f"""with open({str(root / "executions")!r}, "a") as file:
    file.write(f"{{len(requests)}} ")
while not Path({str(root / "open")!r}).exists():
    time.sleep(0.005)"""
    write_model(root / "repository", work=work, options=options)


def test_overload_is_refused_early_and_all_accepted_requests_are_answered(tmp_path):
    """The gate is opened only after the last refusal has arrived.

    The test thus proves without a clock that refusals are early.
    """
    instances, queue, num_callers = 2, 4, 20
    write_gated_model(tmp_path, ServingOptions(instances=instances, max_queued_requests=queue))
    answers, refusals, others = [], [], []

    def send(number):
        client = Triton(server.grpc_url)
        rows = np.full((1, 2), number, np.float32), np.zeros((1, 8), np.int64)
        try:
            answers.append((number, client.infer(MODEL_NAME, *rows)[0][0]))
        except TemporaryError as error:
            (refusals if "Exceeds maximum queue size" in str(error) else others).append(error)
        client.close()

    with TritonServer(tmp_path / "repository", log=tmp_path / "triton.log") as server:
        threads = [threading.Thread(target=send, args=(number,)) for number in range(num_callers)]
        for number, thread in enumerate(threads):
            thread.start()
            if number < instances:
                wait_for(lambda executing=number + 1: len(batches_in(tmp_path)) == executing)
        # Every instance is busy. The queue holds new requests. One request may have left the
        # queue and not reached an instance.
        wait_for(lambda: len(refusals) >= num_callers - instances - queue - 1)
        wait_for(
            lambda: sum(thread.is_alive() for thread in threads) == num_callers - len(refusals)
        )
        assert answers == others == [], "a request was answered while the gate was closed"
        (tmp_path / "open").touch()
        for thread in threads:
            thread.join(120)
    assert others == []
    assert len(answers) + len(refusals) == num_callers
    assert len(answers) - instances in (queue, queue + 1)
    assert all(number == score for number, score in answers), (
        "a client got the scores of other rows"
    )
    assert sum(batches_in(tmp_path)) == len(answers)
    assert len(batches_in(tmp_path)) <= instances + queue + 1, (
        "an accepted request must wait for at most the queue's length"
    )


def batches_in(root):
    """Return the number of requests in each execution of the gated model."""
    return (
        [int(size) for size in (root / "executions").read_text().split()]
        if (root / "executions").exists()
        else []
    )
