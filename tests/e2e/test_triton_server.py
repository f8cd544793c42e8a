"""Tests of the local tritonserver: it starts, reports why it cannot, and leaves nothing behind."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from demo import triton as module
from demo.triton import Ports, TritonServer, TritonSettings, check_repository
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError
from evergreen.serving.repository.triton_config import ServingOptions
from testing.processes import running_in_group, wait_for
from tests.support.errors import raises
from tests.support.triton import write_model


@pytest.fixture
def repository(tmp_path):
    """A repository whose one model returns its first input.

    Tests that start and stop a server need no ONNX model.
    """
    write_model(tmp_path / "model repository", options=ServingOptions())
    return tmp_path / "model repository"


def listening(pid):
    """Return the IPv4 addresses and ports on which a process listens."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
        except FileNotFoundError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:  # 0A = LISTEN
                host, port = fields[1].split(":")
                # gRPC listens on an IPv6 socket, to which an IPv4 address is mapped.
                assert table == "tcp" or host[:24] == "0000000000000000FFFF0000"
                found.add((socket.inet_ntoa(bytes.fromhex(host[-8:])[::-1]), int(port, 16)))
    return found


@contextmanager
def calling(server):
    with InferenceServerClient(server.grpc_url) as client:
        yield client


def is_ready(server, *model):
    """Return whether the server, or a model and its version, is ready."""
    with calling(server) as client:
        return client.is_model_ready(*model) if model else client.is_server_ready()


def test_empty_repository_starts_and_stops_leaving_nothing(tmp_path):
    with TritonServer(tmp_path / "new repository", log=tmp_path / "logs" / "triton.log") as server:
        assert is_ready(server)
        assert b"nv_" in urllib.request.urlopen(server.metrics_url, timeout=60).read()
        assert server.alive()
        assert server.returncode is None
        pid, [alias] = server.pid, server._aliases
    assert not server.alive()
    assert server.returncode == 0
    assert not running_in_group(pid)
    assert not alias.exists()
    assert not list(Path("/dev/shm").glob(f"{server._shm_prefix}*"))


def test_published_model_is_served_from_paths_with_spaces(repository, tmp_path):
    import numpy as np

    from evergreen.serving.servers import Triton

    with TritonServer(
        repository, log=tmp_path / "a log folder" / "triton.log", variables={"MARK": "mine"}
    ) as server:
        client = Triton(server.grpc_url)
        scores, version = client.infer(
            "click_model", np.full((3, 2), 0.25, np.float32), np.zeros((3, 8), np.int64)
        )
        client.close()
        assert b"MARK=mine" in Path(f"/proc/{server.pid}/environ").read_bytes()
    assert scores.tolist() == [0.25] * 3
    assert version == 1


def test_server_listens_on_loopback_alone_and_only_for_grpc_and_metrics(repository, tmp_path):
    with TritonServer(repository, log=tmp_path / "triton.log") as server:
        assert listening(server.pid) == {("127.0.0.1", port) for port in server._listening}


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.register_system_shared_memory("mine", "/mine", 64),
        lambda client: client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]}),
        lambda client: client.update_log_settings({"log_verbose_level": 1}),
    ],
    ids=["shared memory", "trace", "log"],
)
def test_client_may_not_register_memory_nor_change_traces_and_logs(repository, tmp_path, call):
    with (
        TritonServer(repository, log=tmp_path / "triton.log") as server,
        calling(server) as client,
        pytest.raises(InferenceServerException, match="restricted|expected header"),
    ):
        call(client)


def test_proxy_in_environment_is_not_used(repository, tmp_path, monkeypatch):
    from evergreen.serving.servers import Triton

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


@pytest.mark.parametrize(
    "service",
    [
        name if name == "grpc" else pytest.param(name, marks=pytest.mark.slow)
        for name in Ports._fields
    ],
)
def test_port_taken_between_choice_and_start_leads_to_other_ports(tmp_path, monkeypatch, service):
    choose, num_choices = module._free_ports, []
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]

        def taken_port_once():
            num_choices.append(1)
            return choose()._replace(**{service: port}) if len(num_choices) == 1 else choose()

        monkeypatch.setattr(module, "_free_ports", taken_port_once)
        with TritonServer(tmp_path / "repository", log=tmp_path / "triton.log") as server:
            assert port not in server._listening
            assert is_ready(server)
    assert len(num_choices) == 2


def test_version_without_its_code_is_refused_because_it_would_hang_start(repository, tmp_path):
    (repository / "click_model" / "1" / "model.py").unlink()
    with raises(ContractError, "click_model/1/model.py", "absent"):
        TritonServer(repository, log=tmp_path / "triton.log").start()


def test_configured_version_that_is_absent_is_refused(repository):
    (repository / "click_model" / "1").rename(repository / "elsewhere")
    with raises(ContractError, "click_model/1/model.onnx", "absent"):
        check_repository(repository)


def test_version_folder_that_is_not_configured_may_be_half_copied(repository, tmp_path):
    (repository / "click_model" / "2").mkdir()
    (repository / "click_model" / "2" / "model.onnx").write_bytes(b"the first half of")
    with TritonServer(repository, log=tmp_path / "triton.log") as server:
        assert is_ready(server, "click_model", "1")
        assert not is_ready(server, "click_model", "2")


def test_model_that_cannot_load_ends_start_with_error_of_server(repository, tmp_path):
    (repository / "click_model" / "1" / "model.py").write_text(
        "raise RuntimeError('no such luck')\n"
    )
    server = TritonServer(repository, log=tmp_path / "triton.log")
    with pytest.raises(
        PermanentError, match=r"triton ended with 1 at start: .*(no such luck|click_model)"
    ):
        server.start()
    assert not server.alive()


def test_hanging_start_is_stopped(repository, tmp_path):
    (repository / "click_model" / "1" / "model.py").write_text("import time; time.sleep(600)\n")
    settings = TritonSettings(ready_seconds=0.5, stop_seconds=0.2)
    server = TritonServer(repository, log=tmp_path / "triton.log", settings=settings)
    with raises(TemporaryError, "not ready", "0.5 s"):
        server.start()
    assert not server.alive()
    assert server.returncode is not None


def test_killed_server_is_noticed_and_found_on_same_ports_after_restart(repository, tmp_path):
    with TritonServer(repository, log=tmp_path / "triton.log") as server:
        ports, first = server._listening, server.pid
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: not server.alive())
        assert server.returncode == -signal.SIGKILL
        server.start()
        assert server._listening == ports
        assert server.pid != first
        assert is_ready(server, "click_model", "1")


def test_only_shared_memory_of_killed_owner_is_removed_at_next_start(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True
    )
    left = Path(f"/dev/shm/{module._NAME}{ended.stdout.strip()}_18001_region")
    others = [
        Path(f"/dev/shm/{module._NAME}{os.getpid()}_1_region"),
        Path("/dev/shm/not_evergreen_1_1"),
    ]
    try:
        for path in (left, *others):
            path.touch()
        with TritonServer(tmp_path / "repository", log=tmp_path / "triton.log"):
            assert not left.exists()
            assert all(path.exists() for path in others)
    finally:
        for path in (left, *others):
            path.unlink(missing_ok=True)


def test_canary_is_loaded_at_start_beside_live_model(repository, tmp_path):
    shutil.copytree(repository / "click_model", repository / "click_model_canary")
    config = repository / "click_model_canary" / "config.pbtxt"
    config.write_text(
        config.read_text().replace('name: "click_model"', 'name: "click_model_canary"')
    )
    with TritonServer(repository, log=tmp_path / "triton.log") as server:
        for name in ("click_model", "click_model_canary"):
            assert is_ready(server, name)


def test_server_and_its_stubs_do_not_outlive_their_killed_owner(repository, tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from demo.triton import TritonServer\n"
        "server = TritonServer(Path(sys.argv[1]), log=Path(sys.argv[2])).start()\n"
        "print(server.pid, flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, repository, tmp_path / "triton.log"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    pid = int(owner.stdout.readline())
    assert pid in running_in_group(pid)
    assert len(running_in_group(pid)) > 1, "the model's stub process must run too"
    owner.kill()
    owner.wait(120)
    owner.stdout.close()
    wait_for(lambda: not running_in_group(pid))
