"""Tests that the watermark of an unordered log never passes pending messages."""

from evergreen.events.pubsub.subscriber import Watermark

SETTLE, LEASE = 5.0, 30.0
START = 1_700_000_000.0


def value_at(
    watermark: Watermark,
    seconds: float,
    *,
    connected_at: float | None = 0.0,
    oldest: float | None = None,
):
    """Return the watermark at the time when both clocks have run for `seconds`."""
    oldest = None if oldest is None else START + oldest
    value = watermark.value(
        now=START + seconds, at=seconds, connected_at=connected_at, oldest_in_hand=oldest
    )
    return None if value is None else value - START


def test_nothing_is_read_before_leases_of_killed_predecessor_end():
    watermark = Watermark(settle_seconds=SETTLE, lease_seconds=LEASE)
    watermark.arrived(START + 1.0, at=1.0)
    assert value_at(watermark, 29.9) is None
    assert value_at(watermark, 30.0) == 25.0


def test_idle_log_is_read_up_to_now_except_for_messages_in_transit():
    watermark = Watermark(settle_seconds=SETTLE, lease_seconds=LEASE)
    assert [value_at(watermark, at) for at in (30.0, 31.0, 100.0)] == [25.0, 26.0, 95.0]


def test_busy_log_is_current_up_to_newest_message_as_backlog_may_follow():
    watermark = Watermark(settle_seconds=SETTLE, lease_seconds=LEASE)
    watermark.arrived(START - 1000.0, at=99.0)
    assert value_at(watermark, 100.0) == -1005.0
    watermark.arrived(START - 900.0, at=100.0)
    watermark.arrived(START - 950.0, at=100.5)  # an older message arrives later
    assert value_at(watermark, 101.0) == -905.0
    assert value_at(watermark, 105.4) == -905.0
    assert value_at(watermark, 105.5) == 100.5


def test_watermark_does_not_pass_oldest_pulled_message():
    watermark = Watermark(settle_seconds=SETTLE, lease_seconds=LEASE)
    watermark.arrived(START + 40.0, at=40.0)
    watermark.arrived(START + 50.0, at=50.0)
    assert value_at(watermark, 50.0, oldest=40.0) == 35.0
    assert value_at(watermark, 500.0, oldest=40.0) == 35.0
    assert value_at(watermark, 500.0) == 495.0


def test_watermark_does_not_move_while_stream_is_down_and_leases_last():
    watermark = Watermark(settle_seconds=SETTLE, lease_seconds=LEASE)
    assert value_at(watermark, 60.0) == 55.0
    assert value_at(watermark, 200.0, connected_at=None) == 55.0
    assert value_at(watermark, 229.0, connected_at=200.0) == 55.0
    assert value_at(watermark, 230.0, connected_at=200.0) == 225.0


def test_future_publish_time_does_not_move_watermark_past_now():
    watermark = Watermark(settle_seconds=SETTLE, lease_seconds=LEASE)
    watermark.arrived(START + 900.0, at=60.0)
    assert value_at(watermark, 61.0) == 56.0
    assert value_at(watermark, 61.0, oldest=900.0) == 56.0
