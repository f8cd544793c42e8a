"""The status page in a real browser, on a desk and on a phone; screenshots are kept under build/.

That it fits every screen is shown with the other pages (tests/crossings/test_pages_in_browser.py).
"""

from dataclasses import replace

import pytest

from monitoring.deciding.policy import Action
from monitoring.showing.exposition import Exposition
from monitoring.showing.page import History, status_page
from monitoring.showing.server import HttpSettings, MonitorServer
from tests.support.browser import browse, needs_browser
from tests.support.paths import REPOSITORY
from tests.support.snapshots import DECISION, DRIFT, EMPTY, EVENTS, FULL, NOW, POINTS

SHOWN = replace(
    FULL,
    time=NOW,
    last_record_time=NOW - 2,
    log_read_up_to=NOW - 1,
    windows=(*FULL.windows, EMPTY),
    decisions=(DECISION, replace(DECISION, policy="sequential", action=Action.OK, reason="evidence 0.8 of 20")),
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
def test_the_page_is_drawn_and_a_screenshot_kept(address, tmp_path, name, width, height):
    picture = REPOSITORY / "build" / "screenshots" / f"status_page_{name}.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.unlink(missing_ok=True)
    browse(tmp_path, f"--window-size={width},{height}", f"--screenshot={picture}", address)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000, "an empty page is a few kilobytes"
