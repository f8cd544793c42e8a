"""Tests of the autoscaler's algorithm: documented cases, and properties."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.autoscaling.hpa import Autoscaler, Controller, Metric, PodCounts, Rules, ScalingPolicy

FREE = Rules(
    stabilization_seconds=0,
    policies=(ScalingPolicy("Percent", 10_000, 15), ScalingPolicy("Pods", 10_000, 15)),
)
FREE_DOWN = Rules(stabilization_seconds=0, policies=(ScalingPolicy("Percent", 100, 15),))


def spec(
    *metrics: Metric,
    min_replicas: int = 1,
    max_replicas: int = 100,
    up: Rules = FREE,
    down: Rules = FREE_DOWN,
) -> Autoscaler:
    return Autoscaler(
        metrics=metrics or (Metric(name="queue", target=100),),
        min_replicas=min_replicas,
        max_replicas=max_replicas,
        up=up,
        down=down,
    )


def once(
    current: int, *, ready: int | None = None, of: Autoscaler | None = None, **values: float | None
) -> int:
    """Return the number of replicas after one sync with the metric values in `values`.

    If a value is None, the metric is unavailable.
    """
    pods = PodCounts(existing=current, ready=current if ready is None else ready)
    return Controller(of or spec()).sync(0.0, current, pods=pods, readings=values)


@pytest.mark.parametrize(
    ("current", "ready", "value", "wanted"),
    [
        # From the documentation: if the value is twice the target, the number of replicas doubles.
        (2, 2, 200, 4),
        (4, 4, 50, 2),  # a value of half the target halves the replicas
        (2, 2, 109, 2),  # a ratio within the tolerance of 0.1 changes nothing
        (2, 2, 110, 2),  # a ratio exactly at the tolerance changes nothing
        (2, 2, 112, 3),  # ceil(2 * 1.12)
        (2, 2, 90, 2),
        (3, 3, 89, 3),  # ceil(3 * 0.89) = 3
        (3, 3, 0, 1),  # ceil(0), and the minimum
        (4, 2, 300, 6),  # only ready pods count: ceil(3 * 2)
        (4, 2, 150, 3),  # while two pods start, the result can be below the current number
        (2, 3, 150, 5),  # pods that are being deleted still count as ready
        (2, 2, None, 2),  # without a value, the number of replicas does not change
    ],
)
def test_value_equals_that_of_controller_source(current, ready, value, wanted):
    assert once(current, ready=ready, queue=value) == wanted


@pytest.mark.parametrize(
    ("current", "value", "wanted"),
    [
        (2, 40, 4),  # ceil(40 / 10)
        (2, 21.9, 2),  # 10.95 per pod is within the tolerance.
        (4, 10, 1),
        (2, 22.1, 3),
    ],
)
def test_sum_is_divided_by_pods_that_exist_whether_ready_or_not(current, value, wanted):
    average = spec(Metric(name="pending", target=10, is_average=True))
    assert once(current, ready=0, of=average, pending=value) == wanted


def test_values_are_compared_in_thousandths_as_in_metrics_api():
    # The value 0.1109 is sent as 110m, which is within the tolerance of the target 100m. Without
    # rounding, 0.1109 would be outside the tolerance.
    assert once(2, of=spec(Metric(name="queue", target=0.1)), queue=0.1109) == 2


@pytest.mark.parametrize(
    ("readings", "wanted"),
    [
        ({"queue": 200.0, "pending": 60.0}, 6),  # the metric with the most replicas decides
        ({"queue": 200.0, "pending": None}, 4),  # scale up although one metric is missing
        ({"queue": 10.0, "pending": None}, 2),  # do not scale down while one metric is missing
        ({}, 2),
    ],
)
def test_largest_recommendation_of_several_metrics_wins_and_none_drops_unseen(readings, wanted):
    two = spec(Metric(name="queue", target=100), Metric(name="pending", target=10, is_average=True))
    assert once(2, of=two, **readings) == wanted


@pytest.mark.parametrize(("select", "wanted"), [("Max", 6), ("Min", 8), ("Disabled", 10)])
def test_select_policy_takes_larger_smaller_or_no_change(select, wanted):
    down = Rules(
        stabilization_seconds=0,
        policies=(ScalingPolicy("Pods", 2, 60), ScalingPolicy("Percent", 40, 60)),
        select=select,
    )
    assert once(10, of=spec(down=down), queue=0.0) == wanted


def test_scale_down_waits_until_no_recommendation_in_window_was_higher():
    down = Rules(stabilization_seconds=300, policies=(ScalingPolicy("Percent", 100, 15),))
    controller, current, seen = Controller(spec(down=down)), 8, {}
    for turn in range(60):
        now = 15.0 * turn
        value = 100.0 if now < 60 else 40.0
        pods = PodCounts(existing=current, ready=current)
        current = controller.sync(now, current, pods=pods, readings={"queue": value})
        seen[now] = current
    # The last recommendation of 8 replicas was made at 45 s. Recommendations count for 300 s.
    assert seen[330.0] == 8
    assert seen[345.0] == 4


policies = st.builds(
    ScalingPolicy,
    st.sampled_from(["Pods", "Percent"]),
    st.integers(1, 150),
    st.sampled_from([15, 30, 60, 120]),
)
rules = st.builds(
    Rules,
    stabilization_seconds=st.sampled_from([0, 30, 120, 300]),
    policies=st.lists(policies, min_size=1, max_size=3).map(tuple),
    select=st.sampled_from(["Max", "Min"]),
)


@settings(deadline=None)
@given(
    up=rules,
    down=rules,
    values=st.lists(st.floats(0, 1000), min_size=1, max_size=60),
    first=st.integers(2, 30),
)
def test_controller_never_violates_bounds_policies_tolerance_or_stabilisation(
    up, down, values, first
):
    controller = Controller(spec(min_replicas=2, max_replicas=30, up=up, down=down))
    current, raw, numbers = first, [first], [first]
    for turn, value in enumerate(values):
        before = current
        pods = PodCounts(existing=before, ready=before)
        current = controller.sync(15.0 * turn, before, pods=pods, readings={"queue": value})
        ratio = int(value * 1000) / 100_000
        raw.append(before if abs(1 - ratio) <= 0.1 else math.ceil(ratio * before))
        assert 2 <= current <= 30
        if current != before:
            direction = up if current > before else down
            assert (current > before) == (raw[-1] > before), (
                "the number of replicas changed against the metric"
            )
            seen = int(direction.stabilization_seconds // 15) or 1
            window = raw[-seen:]
            if current > before:
                assert current <= min(window)
            elif min(window) != window[0]:
                assert current >= min(max(window), before)
            assert abs(current - before) <= _most(direction, numbers, current > before)
        numbers.append(current)


def _most(direction: Rules, numbers: list[int], is_up: bool) -> int:
    """Return the number of replicas after the largest change that the policies allow now.

    `numbers` contains the replicas at earlier syncs, newest last.
    """
    allowed = []
    for policy in direction.policies:
        syncs = int(policy.period_seconds // 15)
        # A change exactly one period ago is outside the period. The number of replicas after this
        # change is the start of the period.
        start = numbers[-syncs] if len(numbers) >= syncs else numbers[0]
        end = start + policy.value if is_up else start - policy.value
        if policy.type == "Percent":
            share = start * (1 + (1 if is_up else -1) * policy.value / 100)
            end = math.ceil(share) if is_up else int(share)
        allowed.append(end - numbers[-1] if is_up else numbers[-1] - end)
    chosen = (max if direction.select == "Max" else min)(allowed)
    return max(0, chosen)
