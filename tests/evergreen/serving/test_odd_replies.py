"""Tests of malformed replies that a correct Triton never sends.

The controller must report each malformed reply as a fault that names the server.
"""

import dataclasses
import itertools
import json
import random
from contextlib import closing, contextmanager

import grpc
import numpy as np
import pytest

from controller.__main__ import ReleaseController
from controller.baking import Baking
from controller.canary import evidence
from controller.canary.evidence import counted, fetch
from controller.inspection import Inspection
from controller.watchdog import HEALTHY, SUSPECT, UNHEALTHY, Watchdog
from evergreen.registry.traffic_plan import Arm
from evergreen.runtime.errors import PermanentError, TemporaryError
from evergreen.serving.servers import Triton
from testing.controllers import run_now
from testing.recommenders import accept_into, shop_with
from testing.served_names import CANARY_NAME, MODEL_NAME
from tests.support.http_double import HttpDouble, Reply
from tests.support.triton_double import GrpcTriton, edited


@contextmanager
def target_of(deployment):
    """Yield malformed replies by method, and settings for a gRPC server that sends them."""
    with GrpcTriton(deployment.servers[0]) as odd:
        yield odd, dataclasses.replace(deployment.settings, triton_urls=(odd.url,), connect=Triton)


def one_output(reply):
    return reply.outputs[0]


def raw(content):
    def change(reply):
        reply.raw_output_contents[0] = content(reply.raw_output_contents[0])

    return change


def shape(*sizes):
    def change(reply):
        del one_output(reply).shape[:]
        one_output(reply).shape.extend(sizes)

    return change


def float_bytes(value):
    return lambda right: np.full(len(right) // 4, value, "<f4").tobytes()


def as_strings(reply):
    del reply.raw_output_contents[:]
    one_output(reply).contents.bytes_contents.extend([b"0.5"] * 64)


ODD_INFERENCES = {
    "nothing": lambda right: b"",
    "no message": lambda right: b"\xff\xff\xff\xff",
    "a cut message": lambda right: right[:-3],
    "text": lambda right: b"<html>502 Bad Gateway</html>",
    "no output": edited(lambda reply: reply.ClearField("outputs")),
    "no content": edited(lambda reply: reply.ClearField("raw_output_contents")),
    "another output": edited(lambda reply: setattr(one_output(reply), "name", "logit")),
    "the output twice": edited(lambda reply: reply.outputs.append(one_output(reply))),
    "strings": edited(lambda reply: setattr(one_output(reply), "datatype", "BYTES")),
    "strings beside": edited(as_strings),
    "doubles": edited(lambda reply: setattr(one_output(reply), "datatype", "FP64")),
    "an unknown type": edited(lambda reply: setattr(one_output(reply), "datatype", "FP31")),
    "no type": edited(lambda reply: setattr(one_output(reply), "datatype", "")),
    "a shape too large": edited(shape(65, 1)),
    "a shape too small": edited(shape(1, 1)),
    "a negative shape": edited(shape(-1, -1)),
    "a huge shape": edited(shape(2**62, 2**62)),
    "an empty shape": edited(shape()),
    "half a score": edited(raw(lambda right: right[:-2])),
    "one score less": edited(raw(lambda right: right[:-4])),
    "no scores": edited(raw(lambda right: b"")),
    "NaN": edited(raw(float_bytes(np.nan))),
    "infinity": edited(raw(float_bytes(np.inf))),
    "zeros": edited(raw(float_bytes(0.0))),
    "no version": edited(lambda reply: setattr(reply, "model_version", "")),
    "a word as version": edited(lambda reply: setattr(reply, "model_version", "latest")),
    "a signed version": edited(lambda reply: setattr(reply, "model_version", "+1")),
    "a version in other digits": edited(lambda reply: setattr(reply, "model_version", "\u0661")),
    "a version of 5,000 digits": edited(lambda reply: setattr(reply, "model_version", "1" * 5000)),
    "another version": edited(lambda reply: setattr(reply, "model_version", "7")),
    "another model": edited(lambda reply: setattr(reply, "model_name", "other")),
    "a status without words": (grpc.StatusCode.INTERNAL, ""),
    "a status of many words": (grpc.StatusCode.UNKNOWN, "x" * 5000),
    "data loss": (grpc.StatusCode.DATA_LOSS, "lost"),
}
OTHER_CALLS = ("ServerLive", "ModelReady", "RepositoryModelLoad", "RepositoryModelUnload")
ODD_ELSEWHERE = {
    "no message": lambda right: b"\xff\xff\xff\xff",
    "unimplemented": (grpc.StatusCode.UNIMPLEMENTED, ""),
    "internal": (grpc.StatusCode.INTERNAL, "\u2028 \x1b[31m"),
}


@pytest.fixture
def controlled(deployment, tmp_path):
    """A controller over one server with malformed replies, and a reader of its status."""
    deployment.release(1)
    with target_of(deployment) as (odd, target):
        status = tmp_path / "status.json"
        controller = ReleaseController(
            watchdog=Watchdog(target=target),
            baking=Baking(target=target, fetch=lambda address: ""),
            inspection=Inspection(target=target, start=run_now),
            status=status,
        )

        def look():
            controller.round()
            document = json.loads(status.read_text())
            assert document["problem"] is None
            return document["servers"].popitem()[1]

        yield odd, look


def test_no_odd_reply_ends_controller_and_each_is_that_servers_fault(controlled):
    odd, look = controlled
    assert look() == HEALTHY
    for name, reply in ODD_INFERENCES.items():
        odd.odd = {"ModelInfer": reply}
        assert [look(), look()] == [SUSPECT, UNHEALTHY], name
        odd.odd = {}
        assert look() == HEALTHY, f"after {name}"


@pytest.mark.parametrize("call", OTHER_CALLS)
def test_odd_replies_to_other_calls_end_nothing_either(controlled, call):
    odd, look = controlled
    for name, reply in ODD_ELSEWHERE.items():
        # The model's score is also wrong, so that the watchdog reloads the model.
        odd.odd = {"ModelInfer": ODD_INFERENCES["zeros"], call: reply}
        assert HEALTHY not in [look() for _ in range(4)], (call, name)
        assert call in odd.called
        odd.odd = {}
        # After an unload without a successful load, the wait before the next attempt doubles each
        # time.
        assert HEALTHY in [look() for _ in range(20)]


def test_replies_of_flipped_bytes_are_read_as_scores_or_refused(deployment):
    deployment.release(1)
    random_ = random.Random(5)
    with target_of(deployment) as (odd, target):
        client = Triton(target.triton_urls[0])
        golden = deployment.repository.published.golden_rows(1)
        outcomes = {"read": 0, "refused": 0}

        def flipped(reply):
            changed = bytearray(reply)
            for _ in range(random_.randint(1, 3)):
                # The flip changes the head of the message but not its scores.
                changed[random_.randrange(90)] ^= 1 << random_.randrange(8)
            return bytes(changed)

        odd.odd = {"ModelInfer": flipped}
        for _ in range(300):
            try:
                scores, version = client.infer(MODEL_NAME, golden.dense, golden.categorical)
            except (PermanentError, TemporaryError):
                outcomes["refused"] += 1
                continue
            outcomes["read"] += 1
            assert (scores.dtype, scores.ndim, type(version)) == (np.float32, 1, int)
        client.close()
    assert outcomes["refused"] > 100, outcomes


@pytest.mark.parametrize(
    "name", ["no output", "strings", "no version", "no message", "another model"]
)
def test_release_that_odd_server_answers_comes_to_nothing(deployment, name):
    deployment.release(1)
    with target_of(deployment) as (odd, target):
        deployment.settings = target
        odd.odd = {"ModelInfer": ODD_INFERENCES[name]}
        with pytest.raises((PermanentError, TemporaryError), match=target.triton_urls[0]):
            deployment.release(2)
        odd.odd = {}
        assert deployment.entries()[-1].action == "withdrawn"
        assert deployment.servers[0].loaded() == [1]
        deployment.release(3)
        assert deployment.servers[0].loaded() == [3]


SUCCESS = "nv_inference_request_success"
ARMS = {
    "live": Arm(model_name=MODEL_NAME, version=1),
    "other": Arm(model_name=CANARY_NAME, version=2),
}


@pytest.mark.parametrize("count", ["NaN", "+Inf", "-Inf", "-1", "1e300", "9.3e18"])
def test_counter_that_is_no_count_makes_servers_metrics_unreadable(count):
    text = f'{SUCCESS}{{model="{MODEL_NAME}",version="1"}} {count}\n'
    with pytest.raises(
        TemporaryError,
        match=rf"metrics of server cannot be read: {SUCCESS} is .*, expected a count",
    ):
        counted(text, ARMS)


def test_odd_counters_take_nothing_back_and_end_no_round(deployment):
    deployment.release(1), deployment.release(2)
    accept_into(deployment.settings.store, shop_with(release={"bake_seconds": 7200.0}))
    for count in ("NaN", "+Inf", "-5", "1e300"):
        for name in ("request_failure", "compute_infer_duration_us", "request_success"):
            texts = [
                f'nv_inference_{name}{{model="{MODEL_NAME}",version="2"}} {each}\n'
                for each in (0, count)
            ]
            baking = Baking(
                target=deployment.settings,
                metrics=("triton-a:8002",),
                fetch=lambda address, texts=texts: texts.pop(0),
            )
            assert {baking.step({}).action for _ in range(2)} == {"bakes"}


class Endless(HttpDouble):
    """Endless metrics."""

    def answer(self, method, path, body, headers):
        return Reply(itertools.repeat(b"# text\n" * 10_000))


def test_metrics_without_end_are_given_up(monkeypatch):
    monkeypatch.setattr(evidence, "MAX_TEXT_BYTES", 1 << 20)
    with closing(Endless()) as server, pytest.raises(TemporaryError, match="at most 1,048,576 b"):
        fetch(server.url.removeprefix("http://"))
