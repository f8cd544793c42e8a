"""The optional Redis for Triton's response cache, run for real by its manifest's own arguments.

That Triton's cache speaks to it was not run: the server wheel of a laptop holds no Redis cache. The variable of the
password is the one that Triton's own test of that cache sets (server repository, qa/L0_redis).
"""

from __future__ import annotations

import shutil
import socket
import subprocess
from contextlib import closing, contextmanager

import pytest

from pipelines.local.stack import LOOPBACK, tethered
from tests.k8s.pod import triton_container
from tests.support.processes import wait_for
from tests.support.rendering import find, matches, pod_template


@pytest.fixture(params=["cpu+redis-cache", "gke+redis-cache"])
def with_cache(rendered, request):
    """The objects of an overlay with the component switched on."""
    return rendered(request.param)


@pytest.fixture
def redis_pod(rendered):
    """Spec of Redis' pods."""
    return pod_template(find(rendered("cpu+redis-cache"), "Deployment", "redis"))["spec"]


def test_triton_gets_the_flags_of_the_redis_cache_and_nothing_else_changes(with_cache, rendered, request):
    overlay = request.node.callspec.params["with_cache"].partition("+")[0]
    args, plain = triton_container(with_cache)["args"], triton_container(rendered(overlay))["args"]
    service = find(with_cache, "Service", "redis")
    port = service["spec"]["ports"][0]["port"]
    settings = {"host": service["metadata"]["name"], "port": port, "connect_timeout": 100, "socket_timeout": 100}
    assert args == [*plain, *(f"--cache-config=redis,{name}={value}" for name, value in settings.items())]


def test_the_password_comes_from_a_secret_that_may_be_absent(with_cache):
    (entry,) = [e for e in triton_container(with_cache)["env"] if e["name"] == "TRITONCACHE_REDIS_PASSWORD"]
    assert entry["valueFrom"]["secretKeyRef"] == {"name": "redis", "key": "password", "optional": True}


def test_only_triton_reaches_redis_and_redis_reaches_nobody(with_cache):
    policy = find(with_cache, "NetworkPolicy", "redis")["spec"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert policy.get("egress", []) == []
    (rule,) = policy["ingress"]
    (peer,) = rule["from"]
    assert set(peer) == {"podSelector"}, "no other namespace"
    reached = {
        workload["metadata"]["name"]
        for workload in with_cache
        if (template := pod_template(workload)) and matches(peer["podSelector"], template["metadata"]["labels"])
    }
    assert reached == {"triton"}


def option(arguments, name):
    return arguments[arguments.index(name) + 1]


@contextmanager
def redis(container, folder, change):
    """The real server with the container's command and arguments; `change` has what this machine must have else."""
    if not (shutil.which("redis-server") and shutil.which("redis-cli")):
        pytest.skip("redis is not installed")
    with closing(socket.create_server((LOOPBACK, 0))) as free:
        port = free.getsockname()[1]
    change = {"--port": str(port), "--dir": str(folder), **change}
    arguments = list(container["args"])
    for name, value in change.items():
        arguments[arguments.index(name) + 1] = value
    command = [*container["command"], *arguments, "--bind", LOOPBACK]
    with open(folder / "redis.log", "wb") as log:
        process = subprocess.Popen(tethered(command), stdout=log, stderr=subprocess.STDOUT)

    def answers():
        assert process.poll() is None, (folder / "redis.log").read_text()
        return any("PONG" in line or "NOAUTH" in line for line in ask(port, "PING"))

    try:
        wait_for(answers)
        yield port
    finally:
        process.kill()
        process.wait()


def ask(port, *words, password=None):
    """What one command of redis-cli prints."""
    login = ["-a", password, "--no-auth-warning"] if password else []
    command = ["redis-cli", "-h", LOOPBACK, "-p", str(port), *login, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.split("\n")[:-1]


@pytest.mark.e2e
def test_it_keeps_nothing_answers_without_the_secret_and_with_it_only_who_knows_the_password(redis_pod, tmp_path):
    (container,) = redis_pod["containers"]
    (mount,) = [m for m in container["volumeMounts"] if m["name"] == "secret"]
    pattern = option(container["args"], "--include")
    assert pattern == f"{mount['mountPath']}/*.conf"
    secret = tmp_path / "secret"
    secret.mkdir()
    with redis(container, tmp_path, {"--include": f"{secret}/*.conf"}) as port:
        assert ask(port, "PING") == ["PONG"]
        assert ask(port, "CONFIG", "GET", "maxmemory-policy")[1] == "allkeys-lru"
        assert ask(port, "CONFIG", "GET", "save")[1] == "", "it keeps nothing on disk"
    (volume,) = [v["secret"] for v in redis_pod["volumes"] if v["name"] == "secret"]
    assert volume["optional"] is True
    (secret / volume["items"][0]["path"]).write_text("requirepass a-word\n")
    with redis(container, tmp_path, {"--include": f"{secret}/*.conf"}) as port:
        assert "NOAUTH" in ask(port, "PING")[0]
        assert "NOAUTH" in " ".join(ask(port, "PING", password="another"))
        assert ask(port, "PING", password="a-word") == ["PONG"]
        values = ask(port, "CONFIG", "GET", "maxmemory", password="a-word")
        assert values == ["maxmemory", str(2**30)], "the file adds to the arguments"
