"""Two replicas as real processes over one log: one works, one stands by and says so, and takes over from the dead."""

from __future__ import annotations

import json
import re
import signal
import time

import pytest

from tests.monitoring.conftest import prediction, publish, read_events
from tests.monitoring.test_process import DIRECT, Processes, wait_until


class Replicas(Processes):
    """Monitors of one log and one lease; each with the state folder that it is given."""

    def replica(self, name: str, **flags):
        folder = self.folder / name
        values = {"state": folder / "state", "archive": folder / "archive", "lease_seconds": 5.0, **flags}
        process = self.monitor(**values)
        process.number = len(self.started) - 1
        return process

    def address(self, process) -> str:
        path = self.folder / f"monitoring.{process.number}.log"
        found = wait_until(lambda: re.search(r"listening on (http://\S+)", path.read_text()), what="the address")
        return found.group(1)

    def status(self, process) -> dict:
        with DIRECT.open(self.address(process) + "/status", timeout=60) as answer:
            return json.loads(answer.read())

    def addresses(self, names) -> list[str]:
        """Where the monitors of these folders can be asked, as the folders say."""
        told = [json.loads((self.folder / name / "state" / "http.json").read_text()) for name in names]
        return [f"http://{each['host']}:{each['port']}" for each in told]

    def role(self, process) -> str:
        return self.status(process)["role"]

    def predicted(self, process) -> float:
        return self.status(process)["counters"].get("predicted", 0)

    def leads(self, process) -> bool:
        status = self.status(process)
        return status["role"] == "leader" and status["time"] is not None


@pytest.fixture
def replicas(tmp_path):
    made = Replicas(tmp_path)
    yield made
    for process in made.started:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
    made.log.close()


def send(replicas, name: str) -> None:
    publish(replicas.log, prediction(name, 8, time=time.time()))


@pytest.mark.parametrize("folders", [("a", "b"), ("shared", "shared")], ids=["folders of their own", "one folder"])
def test_a_standby_takes_nothing_until_the_leader_is_dead(replicas, folders):
    first = replicas.replica(folders[0])
    wait_until(lambda: replicas.leads(first), what="the leader")
    second = replicas.replica(folders[1])
    wait_until(lambda: replicas.role(second) == "standby", what="the standby")
    for number in range(5):
        send(replicas, f"to the leader {number}")
    wait_until(lambda: replicas.predicted(first) == 40, what="the messages")
    shown = replicas.address(first if folders[0] == folders[1] else second)
    assert replicas.addresses(folders) == [replicas.address(first), shown]
    status = replicas.status(second)
    assert status["role"] == "standby"
    assert status["counters"] == {}
    assert status["decision"].startswith("standing by: ")
    with DIRECT.open(replicas.address(second) + "/healthz", timeout=60) as answer:
        assert answer.status == 200
    first.kill()
    first.wait()
    send(replicas, "to the successor")
    wait_until(lambda: replicas.leads(second), what="the takeover")
    assert replicas.addresses(folders)[1] == replicas.address(second)
    expected = 48 if folders[0] == folders[1] else 8
    wait_until(lambda: replicas.predicted(second) == expected, what="the message")
    assert replicas.end(second) == 0


def test_a_frozen_leader_wakes_up_as_a_standby(replicas):
    first = replicas.replica("a")
    wait_until(lambda: replicas.leads(first), what="the leader")
    second = replicas.replica("b")
    wait_until(lambda: replicas.role(second) == "standby", what="the standby")
    first.send_signal(signal.SIGSTOP)
    wait_until(lambda: replicas.leads(second), what="the takeover")
    first.send_signal(signal.SIGCONT)
    wait_until(lambda: replicas.role(first) == "standby", what="the old leader's retreat")
    send(replicas, "x")
    wait_until(lambda: replicas.predicted(second) == 8, what="the message")
    assert replicas.leads(second)
    assert [event["kind"] for event in read_events(replicas.folder / "a" / "state")] == ["started"]


def test_a_leader_that_is_asked_to_end_hands_over_at_once(replicas):
    first = replicas.replica("a", lease_seconds=600.0)
    wait_until(lambda: replicas.leads(first), what="the leader")
    second = replicas.replica("b", lease_seconds=600.0)
    wait_until(lambda: replicas.role(second) == "standby", what="the standby")
    assert replicas.end(first) == 0
    wait_until(lambda: replicas.leads(second), what="the takeover")


def test_a_standby_that_is_asked_to_end_ends(replicas):
    first = replicas.replica("a")
    wait_until(lambda: replicas.leads(first), what="the leader")
    second = replicas.replica("b")
    wait_until(lambda: replicas.role(second) == "standby", what="the standby")
    assert replicas.end(second) == 0
    assert replicas.leads(first)


def test_a_lease_that_cannot_be_written_is_one_line_that_says_what_to_do(replicas):
    (replicas.folder / "no folder").write_text("")
    process = replicas.replica("a", lease=str(replicas.folder / "no folder"))
    assert process.wait(120) == 1
    last = (replicas.folder / f"monitoring.{process.number}.log").read_text().splitlines()[-1]
    assert last.startswith("error: the lease cannot be taken: ")
    assert "set `lease` to a folder or bucket" in last
