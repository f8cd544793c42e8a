"""Tests of the traffic plan: plan and key select the version, and malformed plans are refused."""

import hashlib
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evergreen.registry.traffic_plan import Arm, TrafficPlan
from evergreen.runtime.errors import ContractError
from tests.support.errors import raises

STABLE = Arm(model_name="click_model", version=3)
CANARY = Arm(model_name="click_model_canary", version=4)
NUM_KEYS = 40_000


def plan(**changes) -> TrafficPlan:
    values = {
        "sequence": 2,
        "stable": STABLE,
        "canary": CANARY,
        "canary_share": 0.05,
        "shadow_share": 0.2,
        "salt": "s",
        "published_at": "2026-01-01T00:00:00+00:00",
        "reason": "a new model",
    }
    return TrafficPlan(**{**values, **changes})


SHARES = st.floats(0, 1)


@given(key=st.text(), salt=st.text(), shares=st.tuples(SHARES, SHARES))
def test_growing_canary_keeps_every_key_that_it_had(key, salt, shares):
    small, large = sorted(shares)
    if plan(canary_share=small, salt=salt).arm_for(key) == CANARY:
        assert plan(canary_share=large, salt=salt).arm_for(key) == CANARY


@pytest.mark.parametrize("share", [0.0, 0.01, 0.05, 0.25, 1.0])
@pytest.mark.parametrize("salt", ["a", "b", ""])
def test_share_of_keys_is_met_within_binomial_error(share, salt):
    one = plan(canary_share=share, shadow_share=share, salt=salt)
    num_canary = sum(one.arm_for(f"user-{i}") == CANARY for i in range(NUM_KEYS))
    shadowed = sum(one.shadow_for("u", f"request-{i}") is not None for i in range(NUM_KEYS))
    error = 4 * math.sqrt(NUM_KEYS * share * (1 - share))
    assert abs(num_canary - NUM_KEYS * share) <= error
    assert abs(shadowed - NUM_KEYS * share) <= error


def _counts(first, second):
    """Return the observed and the expected count for each pair of draws.

    The expected counts assume independent draws.
    """
    table = {(a, b): 0 for a in (0, 1) for b in (0, 1)}
    for a, b in zip(first, second):
        table[int(a), int(b)] += 1
    n = len(first)
    return {
        k: (v, sum(table[k[0], b] for b in (0, 1)) * sum(table[a, k[1]] for a in (0, 1)) / n)
        for k, v in table.items()
    }


def test_shadow_is_drawn_independently_of_arm():
    one = plan(canary_share=0.25, shadow_share=0.2)
    keys = [f"k{i}" for i in range(NUM_KEYS)]
    # Each key is also the request id. The draw of the arm and the draw of the shadow request must
    # be independent.
    arms = [one.arm_for(key) == CANARY for key in keys]
    shadows = [one.shadow_for(key, key) is not None for key in keys]
    for found, expected in _counts(arms, shadows).values():
        assert abs(found - expected) <= 4 * math.sqrt(expected)


@given(key=st.text(), request=st.text())
def test_shadow_is_always_other_arm(key, request):
    one = plan(canary_share=0.5, shadow_share=1.0)
    assert {one.arm_for(key).version, one.shadow_for(key, request).version} == {3, 4}


@given(key=st.text(), request=st.text())
def test_without_canary_stable_arm_answers_and_no_shadow_is_sent(key, request):
    one = plan(canary=None, canary_share=0.0, shadow_share=0.0)
    assert one.arm_for(key) == STABLE
    assert one.shadow_for(key, request) is None


def test_key_that_utf8_cannot_encode_has_arm():
    assert plan().arm_for("\ud800") in (STABLE, CANARY)


def test_draws_equal_formula_that_clients_of_all_releases_share():
    """Clients of different releases must route a key to the same version.

    The expected numbers are computed by hand from blake2b.
    """
    digest = hashlib.blake2b(b"s\0arm\0user", digest_size=8).digest()
    fraction = (int.from_bytes(digest, "big") >> 11) / 2**53
    assert plan(canary_share=math.nextafter(fraction, 1)).arm_for("user") == CANARY
    assert plan(canary_share=fraction).arm_for("user") == STABLE


@given(share=SHARES, shadow=SHARES, salt=st.text(), reason=st.text(), value=st.floats(0, 1e12))
@settings(max_examples=50)
def test_plan_is_unchanged_after_json(share, shadow, salt, reason, value):
    baseline = {"127.0.0.1:8002": {"stable": {"success": value}, "canary": {}}}
    one = plan(canary_share=share, shadow_share=shadow, salt=salt, reason=reason, baseline=baseline)
    assert TrafficPlan.loads(one.dumps(), source="traffic.json") == one


def test_next_plan_continues_and_keeps_unchanged_fields():
    grown = plan().next(canary_share=0.25)
    assert (grown.sequence, grown.canary_share, grown.salt) == (3, 0.25, "s")
    ended = grown.without_canary(
        stable=STABLE, published_at="2026-01-02T00:00:00+00:00", reason="worse"
    )
    assert (ended.sequence, ended.canary, ended.shadow_share, ended.baseline) == (4, None, 0.0, {})


MALFORMED = [
    ({"format_version": 2}, "format_version 2, expected 1"),
    ({"sequence": 0}, "sequence is 0"),
    ({"sequence": 1.5}, "sequence is 1.5"),
    ({"sequence": True}, "sequence is True"),
    ({"canary_share": 1.01}, "canary_share is 1.01, expected a number in 0..1"),
    ({"canary_share": "0.5"}, "canary_share is '0.5'"),
    ({"canary_share": math.nan}, "canary_share is nan"),
    ({"shadow_share": True}, "shadow_share is True"),
    ({"shadow_share": None}, "shadow_share is None"),
    ({"published_at": "yesterday"}, "published_at is 'yesterday'"),
    ({"published_at": "2026-01-01T00:00:00"}, "published_at is"),
    ({"stable": None}, "stable is None, expected an object"),
    ({"stable": {"model_name": "click_model"}}, "missing fields"),
    ({"stable": {"model_name": "", "version": 3}}, "model_name is ''"),
    ({"stable": {"model_name": "click_model", "version": "3"}}, "version is '3'"),
    ({"stable": {"model_name": "click_model", "version": 0}}, "version is 0"),
    (
        {"stable": {"model_name": "click_model", "version": 3, "weight": 1}},
        "unknown or missing fields",
    ),
    ({"canary": {"model_name": "click_model", "version": 4}}, "both arms are named 'click_model'"),
    ({"canary": None}, "without a canary"),
    ({"colour": "blue"}, "unknown or missing fields"),
]


@pytest.mark.parametrize(("changes", "message"), MALFORMED, ids=lambda value: str(value)[:50])
def test_malformed_plan_is_refused_with_its_source_and_value(changes, message):
    document = {**json.loads(plan().dumps()), **changes}
    del document["crc32"]
    with raises(ContractError, "traffic.json") as refused:
        TrafficPlan.loads(json.dumps(document).encode(), source="traffic.json")
    assert message in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"{", b"\xff", b"1", b"[" * 100_000])
def test_text_that_is_no_json_object_is_refused(content):
    with pytest.raises(ContractError, match=r"traffic\.json (is not JSON|holds a)"):
        TrafficPlan.loads(content, source="traffic.json")
