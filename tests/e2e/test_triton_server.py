"""The local tritonserver: it starts, says why it cannot, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from components.contracts.errors import ContractError, PermanentError, TemporaryError
from pipelines.local import triton as module
from pipelines.local.triton import Ports, TritonServer, TritonSettings, check_repository

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]

ECHO = """\
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        dense = [pb_utils.get_input_tensor_by_name(r, "dense").as_numpy() for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("probability", d[:, :1])]) for d in dense]
"""


@pytest.fixture
def repository(tmp_path):
    """A repository whose one model answers with its first input; no ONNX needed to test the server's life."""
    from components.deployment.triton_config import triton_config

    path = tmp_path / "model repository"
    (path / "click_model" / "1").mkdir(parents=True)
    (path / "click_model" / "config.pbtxt").write_text(triton_config("click_model", "python", [1]))
    (path / "click_model" / "1" / "model.py").write_text(ECHO)
    (path / "click_model" / "1" / "model.onnx").touch()
    return path


def status(url):
    with urllib.request.urlopen(url, timeout=5) as answer:
        return answer.status


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def test_an_empty_repository_starts_and_stops_leaving_nothing(tmp_path):
    with TritonServer(tmp_path / "new repository", log=tmp_path / "logs" / "triton.log") as server:
        assert status(f"{server.http_url}/v2/health/ready") == 200
        assert b"nv_" in urllib.request.urlopen(server.metrics_url, timeout=5).read()
        assert server.alive()
        assert server.returncode is None
        pid, [alias] = server.pid, server._aliases
    assert not server.alive()
    assert server.returncode == 0
    assert not is_running(pid)
    assert not alias.exists()
    assert not list(Path("/dev/shm").glob(f"{server._shm_prefix}*"))


def test_a_published_model_is_served_from_paths_with_spaces(repository, tmp_path):
    import numpy as np

    from components.deployment.triton_client import Triton

    with TritonServer(repository, log=tmp_path / "a log folder" / "triton.log", variables={"MARK": "mine"}) as server:
        client = Triton(server.grpc_url)
        scores, version = client.infer("click_model", np.full((3, 13), 0.25, np.float32), np.zeros((3, 26), np.int64))
        client.close()
        assert b"MARK=mine" in Path(f"/proc/{server.pid}/environ").read_bytes()
    assert scores.tolist() == [0.25] * 3
    assert version == 1


def test_a_proxy_in_the_environment_is_not_asked(repository, tmp_path, monkeypatch):
    from components.deployment.triton_client import Triton

    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        for name in ("http_proxy", "HTTP_PROXY", "grpc_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{nobody.getsockname()[1]}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        with TritonServer(repository, log=tmp_path / "triton.log") as server:
            client = Triton(server.grpc_url)
            client.check_live()
            client.close()


@pytest.mark.parametrize("service", Ports._fields)
def test_a_port_taken_between_choice_and_start_leads_to_other_ports(tmp_path, monkeypatch, service):
    choose, num_choices = module._free_ports, []
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]

        def unlucky_once():
            num_choices.append(1)
            return choose()._replace(**{service: taken}) if len(num_choices) == 1 else choose()

        monkeypatch.setattr(module, "_free_ports", unlucky_once)
        with TritonServer(tmp_path / "repository", log=tmp_path / "triton.log") as server:
            assert taken not in server._listening
            assert status(f"{server.http_url}/v2/health/ready") == 200
    assert len(num_choices) == 2


def test_an_asked_for_port_that_is_taken_is_named(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        settings = TritonSettings(ports=module._free_ports()._replace(grpc=taken))
        with pytest.raises(PermanentError, match=f"grpc port {taken} is taken"):
            TritonServer(tmp_path / "repository", log=tmp_path / "triton.log", settings=settings).start()


def test_a_version_without_its_code_is_refused_because_it_would_hang_the_start(repository, tmp_path):
    (repository / "click_model" / "1" / "model.py").unlink()
    with pytest.raises(ContractError, match=r"click_model/1/model.py is absent"):
        TritonServer(repository, log=tmp_path / "triton.log").start()


def test_a_configuration_without_versions_is_refused(tmp_path):
    (tmp_path / "click_model").mkdir()
    (tmp_path / "click_model" / "config.pbtxt").write_text('backend: "python"')
    with pytest.raises(ContractError, match="has a configuration and no version"):
        check_repository(tmp_path)


def test_a_model_that_cannot_load_ends_the_start_with_the_servers_own_words(repository, tmp_path):
    (repository / "click_model" / "1" / "model.py").write_text("raise RuntimeError('no such luck')\n")
    server = TritonServer(repository, log=tmp_path / "triton.log")
    with pytest.raises(PermanentError, match=r"triton ended with 1 at start: .*(no such luck|click_model)"):
        server.start()
    assert not server.alive()


def test_a_start_that_hangs_is_given_up_and_stopped(repository, tmp_path):
    (repository / "click_model" / "1" / "model.py").write_text("import time; time.sleep(600)\n")
    settings = TritonSettings(ready_seconds=0.5, stop_seconds=0.2)
    server = TritonServer(repository, log=tmp_path / "triton.log", settings=settings)
    with pytest.raises(TemporaryError, match="triton is not ready after 0.5 s"):
        server.start()
    assert not server.alive()
    assert server.returncode is not None


def test_a_server_that_was_killed_is_noticed_and_swept(repository, tmp_path):
    with TritonServer(repository, log=tmp_path / "triton.log") as server:
        os.kill(server.pid, signal.SIGKILL)
        wait_for(lambda: not server.alive())
        assert server.returncode == -signal.SIGKILL
    assert not list(Path("/dev/shm").glob(f"{server._shm_prefix}*"))
    with TritonServer(repository, log=tmp_path / "triton.log") as again:
        assert again.alive()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM], ids=["owner killed", "owner ended"])
def test_the_server_does_not_outlive_its_owner(repository, tmp_path, end):
    code = (
        "import sys, time; from pathlib import Path; from pipelines.local.triton import TritonServer\n"
        "server = TritonServer(Path(sys.argv[1]), log=Path(sys.argv[2])).start()\n"
        "print(server.pid, flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, repository, tmp_path / "triton.log"],
        stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    pid = int(owner.stdout.readline())
    assert is_running(pid)
    owner.send_signal(end)
    owner.wait(20)
    owner.stdout.close()
    wait_for(lambda: not is_running(pid))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ready_seconds": 0}, "ready_seconds is 0"),
        ({"ports": Ports(1, 1, 2)}, "expected three different ones"),
        ({"ports": Ports(0, 1, 2)}, "expected three different ones"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong, message):
    with pytest.raises(ContractError, match=message):
        TritonSettings(**wrong)


def test_an_unbuilt_serving_environment_is_named(tmp_path):
    settings = TritonSettings(venv=tmp_path / "absent")
    with pytest.raises(ContractError, match="serving environment .*absent is absent"):
        TritonServer(tmp_path / "repository", log=tmp_path / "triton.log", settings=settings).start()
