"""Tests of a deployment's servers: addresses, names, and changing replicas."""

import dataclasses
import socket

import pytest

from controller.release import ReleaseSettings
from evergreen.registry.promotion_journal import current
from evergreen.runtime.errors import ContractError, TemporaryError
from evergreen.serving import servers
from evergreen.serving.servers import NotListening, Timeouts, Triton, parse_urls, resolve
from testing.served_names import MODEL_NAME
from tests.support.deployments import release
from tests.support.triton_double import Altered, TritonDouble

NAME = "dns:///triton-headless:8001"


class Cluster:
    """Pods behind one DNS name, with their state in files. The test sets the list of pods."""

    def __init__(self, root):
        now = iter(range(1_000_000))
        self.root, self.listed, self.num_lookups = root, [], 0
        self.settings = ReleaseSettings(
            store=root / "store",
            repository=str(root / "repository"),
            triton_urls=(NAME,),
            timeouts=Timeouts(clock=lambda: next(now), sleep=lambda _: None),
            resolve=self.resolve,
        )

    def pod(self, host):
        return TritonDouble(
            f"{host}:8001", repository=self.settings.repository, state=self.root / "state"
        )

    def add(self, *hosts):
        self.listed += hosts
        return [self.pod(host).start() for host in hosts]

    def resolve(self, name, port):
        assert (name, port) == ("triton-headless", 8001)
        self.num_lookups += 1
        return [f"{host}:8001" for host in self.listed]

    def release(self, candidate, **altered):
        """Release the candidate to all pods.

        `altered` maps the names of a client's methods to their replacements. Each replacement is
        called with the pod as its first argument.
        """
        settings = dataclasses.replace(
            self.settings,
            connect=lambda url: Altered(self.pod(url.removesuffix(":8001")), **altered),
        )
        return release(*candidate, settings=settings)


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


def test_every_address_of_name_is_notified(cluster, make_candidate):
    pods = cluster.add("10.0.0.1", "10.0.0.2", "10.0.0.3")
    cluster.release(make_candidate(cluster.settings.store, 1))
    assert [pod.loaded() for pod in pods] == [[1], [1], [1]]


def test_replica_that_appears_during_switch_is_notified_too(cluster, make_candidate):
    cluster.add("10.0.0.1")
    cluster.release(make_candidate(cluster.settings.store, 1))

    def slow(pod, name):
        """Block the load until two pods with the old configuration have appeared."""
        if name == MODEL_NAME and len(cluster.listed) < 3:
            host = f"10.0.0.{len(cluster.listed) + 1}"
            (cluster.root / "state" / f"{host}:8001" / MODEL_NAME / "1").mkdir(parents=True)
            cluster.listed.append(host)
        pod.load(name)

    cluster.release(make_candidate(cluster.settings.store, 2), load=slow)
    assert [cluster.pod(host).loaded() for host in ("10.0.0.1", "10.0.0.2", "10.0.0.3")] == [
        [2]
    ] * 3


def test_replica_that_is_starting_is_waited_for(cluster, make_candidate):
    starting = cluster.add("10.0.0.1", "10.0.0.2")[1]
    starting.crash()
    waits = []

    def check_live(pod):
        waits.append(pod.url)
        if len(waits) == 9:
            starting.start()
        pod.check_live()

    cluster.release(make_candidate(cluster.settings.store, 1), check_live=check_live)
    assert starting.loaded() == [1]


def test_pod_still_pulling_image_delays_no_release_and_gets_newest_version(
    cluster, make_candidate, caplog
):
    cluster.add("10.0.0.1")
    cluster.pod("10.0.0.2").crash()
    cluster.listed.append("10.0.0.2")
    done = cluster.release(make_candidate(cluster.settings.store, 1))
    assert cluster.pod("10.0.0.1").loaded() == [done.version] == [1]
    assert "skipped, because nothing listens there: 10.0.0.2:8001" in caplog.text
    assert cluster.pod("10.0.0.2").start().loaded() == [1]


def test_release_to_closed_port_is_temporary_error(cluster, make_candidate):
    cluster.pod("10.0.0.1").crash()
    cluster.listed.append("10.0.0.1")
    with pytest.raises(TemporaryError, match="no server of dns:///triton-headless:8001 listens"):
        cluster.release(make_candidate(cluster.settings.store, 1))
    assert current(cluster.settings.store) is None


def test_server_that_listens_and_does_not_answer_is_still_failure(cluster, make_candidate):
    cluster.add("10.0.0.1", "10.0.0.2")

    def hanging(pod):
        if pod.url.startswith("10.0.0.2"):
            raise TemporaryError("deadline exceeded")
        pod.check_live()

    with pytest.raises(TemporaryError, match="deadline exceeded"):
        cluster.release(make_candidate(cluster.settings.store, 1), check_live=hanging)
    assert current(cluster.settings.store) is None


def test_client_distinguishes_closed_port_from_server_without_answer(monkeypatch):
    monkeypatch.setattr(servers, "CALL_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(TemporaryError, match="liveness") as silent:
            Triton(f"127.0.0.1:{port}").check_live()
    assert not isinstance(silent.value, NotListening)
    with pytest.raises(NotListening, match="liveness"):
        Triton("127.0.0.1:9").check_live()


def test_replica_that_was_deleted_meanwhile_is_no_failure(cluster, make_candidate):
    gone = cluster.add("10.0.0.1", "10.0.0.2")[1]

    def load(pod, name):
        if pod.url == gone.url and name == MODEL_NAME:
            gone.crash()
            cluster.listed.remove("10.0.0.2")
        pod.load(name)

    done = cluster.release(make_candidate(cluster.settings.store, 1), load=load)
    assert cluster.pod("10.0.0.1").loaded() == [1] == [done.version]


def test_release_is_none_when_every_replica_has_left_meanwhile(cluster, make_candidate):
    gone = cluster.add("10.0.0.1")[0]

    def load(pod, name):
        if name == MODEL_NAME:
            gone.crash()
            cluster.listed.clear()
        pod.load(name)

    with pytest.raises(TemporaryError, match="no server is left of dns:///triton-headless:8001"):
        cluster.release(make_candidate(cluster.settings.store, 1), load=load)
    assert current(cluster.settings.store) is None


def test_name_without_address_is_temporary_error(cluster, make_candidate):
    with pytest.raises(TemporaryError, match="dns:///triton-headless:8001 resolves to no address"):
        cluster.release(make_candidate(cluster.settings.store, 1))
    assert current(cluster.settings.store) is None


@pytest.mark.parametrize(
    "text", ["http://host:1", "host", "host:0", "host:70000", ":8001", "dns://host:1", "dns:///h"]
)
def test_malformed_server_address_is_refused(text):
    with pytest.raises(ContractError, match="expected host:grpc_port or dns:///name:grpc_port"):
        parse_urls(f"fine:8001,{text}")


def test_systems_resolver_finds_this_machine_and_no_other():
    assert "127.0.0.1:8001" in resolve("localhost", 8001)
    assert resolve("evergreen-triton.invalid", 8001) == []


def test_addresses_of_both_families_can_be_dialled(monkeypatch):
    found = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", 8001, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 8001)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 8001)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert resolve("triton", 8001) == ["[fd00::1]:8001", "10.0.0.1:8001"]
