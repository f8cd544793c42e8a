"""Tests of the status page in a real browser, on a desktop and a phone.

The tests write screenshots to build/.

tests/crossings/test_pages_in_browser.py tests the accessibility of all pages.
"""

from dataclasses import replace

import pytest

from monitoring.policies.policy import Action
from monitoring.web.exposition import Exposition, Snapshot
from monitoring.web.page import History, status_page
from monitoring.web.server import HttpSettings, MonitorServer
from testing.paths import REPOSITORY
from tests.support.browser import (
    beyond_first_screen,
    browse,
    cut_texts,
    needs_browser,
    pixels_too_wide,
)
from tests.support.snapshots import DECISION, DRIFT, EMPTY, EVENTS, FULL, NOW, POINTS

SHOWN = replace(
    FULL,
    time=NOW,
    last_record_time=NOW - 2,
    log_read_up_to=NOW - 1,
    windows=(*FULL.windows, EMPTY),
    decisions=(
        DECISION,
        replace(DECISION, policy="sequential", action=Action.OK, reason="evidence 0.8 of 20"),
    ),
    drift={**DRIFT, "bucket_end": NOW - 60},
)

pytestmark = needs_browser


@pytest.fixture(scope="module")
def address():
    exposition = Exposition()
    exposition.show(SHOWN)
    server = MonitorServer(
        exposition,
        HttpSettings(http_host="127.0.0.1", http_port=0),
        page=lambda: status_page(exposition, History(POINTS, EVENTS), now=NOW),
    )
    yield f"http://{server.host}:{server.port}/"
    server.close()


@pytest.mark.parametrize(("name", "width", "height"), [("desk", 1100, 1700), ("phone", 412, 2600)])
def test_page_is_drawn_and_screenshot_stored(address, tmp_path, name, width, height):
    picture = REPOSITORY / "build" / "screenshots" / f"status_page_{name}.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.unlink(missing_ok=True)
    browse(tmp_path, f"--window-size={width},{height}", f"--screenshot={picture}", address)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000, "a screenshot of an empty page has a few kilobytes"


LONG = (
    "evidence 101 of 100 that the auc of a_recommender_with_a_very_long_name_indeed is below "
    "0.778; " * 4
)
LONG_NAMES = replace(
    SHOWN,
    recommender="a_recommender_with_a_very_long_name_indeed" * 2,
    decisions=tuple(
        replace(DECISION, policy=f"a_policy_with_a_long_name_{n}", reason=LONG) for n in range(6)
    ),
    drift={
        **SHOWN.drift,
        "columns": [{**each, "feature": each["feature"] * 40} for each in SHOWN.drift["columns"]],
    },
)


@pytest.mark.parametrize(
    ("shown", "num_events"),
    [(Snapshot(), 0), (SHOWN, 1), (LONG_NAMES, 400)],
    ids=["no data", "one event", "long names, many events"],
)
def test_page_fits_pane_and_phone_and_cuts_no_text(tmp_path, shown, num_events):
    exposition = Exposition()
    exposition.show(shown)
    kinds = ("archived", "drift", "decision", "drift", "release")
    events = [
        {"time": NOW - 300 * n, "kind": kinds[n % 5], "text": f"{n} {LONG}"}
        for n in range(num_events)
    ][::-1]
    page = status_page(exposition, History(POINTS[:num_events], events), now=NOW).replace(
        'http-equiv="refresh"', ""
    )
    assert pixels_too_wide(tmp_path, page, 360, 480, 768, 1280) == [0] * 4
    assert cut_texts(tmp_path, page, 360, 480, 768, 1280) == [[]] * 4


def test_first_screen_has_state_chart_and_decision(tmp_path):
    exposition = Exposition()
    exposition.show(SHOWN)
    page = status_page(exposition, History(POINTS, EVENTS), now=NOW)
    assert beyond_first_screen(tmp_path, page.replace('http-equiv="refresh"', "")) == [[], []]
