"""The validation report in a real browser, on light and dark, desk and phone; screenshots are kept under build/."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess

import pytest

from components.validation.report_page import draw_page
from tests.support.paths import REPOSITORY
from tests.support.validation_reports import NUM_CARDS, document_with_drift

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
DARK = "--blink-settings=preferredColorScheme=0"
MEASURE = """<script>
const seen = {}, root = document.documentElement, cards = [...document.querySelectorAll('.card')];
seen.overflow = root.scrollWidth > innerWidth; seen.cards = document.querySelectorAll('.card svg').length;
seen.paper = getComputedStyle(document.body).backgroundColor; seen.ink = getComputedStyle(document.body).color;
const heights = card => [...card.querySelectorAll('rect.now')].map(each => each.getBoundingClientRect().height);
seen.drawn = cards.filter(card => Math.max(...heights(card)) > 20).length;
const link = document.querySelector('a.skip'); link.focus(); seen.skip = link.getBoundingClientRect().left >= 0;
const fold = document.querySelector('details'); fold.querySelector('summary').click(); seen.unfolds = fold.open;
document.title = JSON.stringify(seen);</script>"""

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine (Debian: apt install chromium)")


def browse(tmp_path, *flags: str) -> str:
    # Without a session bus and a display of its own, as on a server; its profile goes with the test.
    environment = {**os.environ, "HOME": str(tmp_path)}
    command = [BROWSER, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    ("name", "width", "dark"), [("light", 1100, False), ("dark", 1100, True), ("phone", 500, False)]
)
def test_the_report_is_drawn_in_its_colours_within_its_width_and_unfolds_by_keys(judged, tmp_path, name, width, dark):
    page = draw_page(document_with_drift(judged, run="hourly-1"))
    copy = tmp_path / "report.html"
    copy.write_text(page.replace("</body>", MEASURE + "</body>"), encoding="utf-8")
    dumped = browse(tmp_path, f"--window-size={width},1400", *([DARK] if dark else []), "--dump-dom", copy.as_uri())
    seen = json.loads(re.search(r"<title>(.*?)</title>", dumped).group(1))
    ground = "rgb(18, 22, 28)" if dark else "rgb(255, 255, 255)"
    # I2 has no value now, so its chart is the champion's alone; all others have bars too.
    assert seen == {
        "overflow": False,
        "cards": NUM_CARDS,
        "paper": ground,
        "ink": seen["ink"],
        "drawn": NUM_CARDS - 1,
        "skip": True,
        "unfolds": True,
    }
    picture = REPOSITORY / "build" / "screenshots" / f"validation_report_{name}.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.unlink(missing_ok=True)
    copy.write_text(page, encoding="utf-8")
    flags = [f"--window-size={width},2000", *([DARK] if dark else [])]
    browse(tmp_path, *flags, f"--screenshot={picture}", copy.as_uri())
    assert picture.stat().st_size > 20_000, "an empty page is a few kilobytes"
