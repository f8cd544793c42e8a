"""Tests of the demo's log: its discovery, its process, and the processes that get its variables."""

import os
import time
from contextlib import closing
from pathlib import Path

import pytest

from demo.log_server import HOST_VARIABLE, find_emulator, start_log
from demo.stack import Stack, tagged_processes
from evergreen.events.locations import open_subscriber
from evergreen.runtime.errors import ContractError
from testing.processes import wait_for
from tests.support.errors import raises, raises_text
from tests.support.log_benches import open_log


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def java(tmp_path):
    return program(tmp_path / "bin" / "java").parent


@pytest.mark.parametrize("way", ["path", "gcloud"])
def test_emulator_is_found_wherever_cloud_sdk_is_installed(way, tmp_path, java):
    sdk = tmp_path / "google-cloud-sdk"
    script = program(sdk / "platform" / "pubsub-emulator" / "bin" / "cloud-pubsub-emulator")
    gcloud = program(sdk / "bin" / "gcloud")
    found = {
        "path": lambda: find_emulator({"PATH": f"{java}{os.pathsep}{script.parent}"}),
        "gcloud": lambda: find_emulator({"PATH": f"{java}{os.pathsep}{gcloud.parent}"}),
    }[way]()
    assert found.resolve() == script


def test_missing_emulator_and_missing_java_are_each_named(tmp_path, java):
    with raises(ContractError, "emulator is absent"):
        find_emulator({"PATH": str(java)})
    script = program(tmp_path / "emulator" / "cloud-pubsub-emulator")
    with raises_text(ContractError, "no-java", emulator=script):
        find_emulator({"PATH": str(script.parent)})


def exchange(log_address, monkeypatch):
    """Publish and read one message as the demo's processes do, and return the message."""
    for name, value in log_address.variables.items():
        monkeypatch.setenv(name, value)
    log = open_log(log_address.url)
    try:
        log.publisher.publish([("a", b"1")])
        pulled = wait_for(lambda: log.subscriber.pull(5), "the message")
        log.subscriber.acknowledge([d.token for d in pulled])
        return [(d.message_id, d.payload) for d in pulled]
    finally:
        log.close()


def test_reader_of_demo_kafka_has_its_offsets_before_first_write(tmp_path):
    """The demo's traffic waits until the log is available."""
    with (
        Stack(logs=tmp_path / "logs", variables={}) as stack,
        closing(open_subscriber(start_log("kafka", tmp_path, stack).url)) as reader,
    ):
        deadline = time.monotonic() + 60
        while reader.read_up_to() is None and time.monotonic() < deadline:
            assert reader.pull(10) == []
            time.sleep(0.01)
        assert reader.read_up_to() is not None, reader.problem()


@pytest.mark.parametrize("kind", ["kafka", "pubsub"])
def test_log_server_of_demo_carries_messages_and_ends_with_stack(kind, tmp_path, monkeypatch):
    if kind == "pubsub":
        try:
            find_emulator()
        except ContractError as error:
            pytest.skip(str(error))
    with Stack(logs=tmp_path / "logs", variables={}) as stack:
        log_address = start_log(kind, tmp_path, stack)
        assert kind == "kafka" or set(log_address.variables) == {HOST_VARIABLE}
        assert exchange(log_address, monkeypatch) == [("a", b"1")]
        (tag,) = stack.tag_variables.values()
        assert tagged_processes(tag)
    assert tagged_processes(tag) == []
