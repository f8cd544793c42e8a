"""Tests of the validation report in a real browser, in dark mode and as narrow as a phone."""

import json
import re

from components.validation.report_page import draw_page
from tests.support.browser import DARK, browse, needs_browser
from tests.support.validation_reports import NUM_CARDS, document_with_drift

MEASURE = """<script>
const seen = {}, root = document.documentElement, cards = [...document.querySelectorAll('.card')];
seen.overflow = root.scrollWidth > innerWidth; seen.cards = document.querySelectorAll('.card svg').length;
seen.paper = getComputedStyle(document.body).backgroundColor; seen.ink = getComputedStyle(document.body).color;
const heights = card => [...card.querySelectorAll('rect.now')].map(each => each.getBoundingClientRect().height);
seen.drawn = cards.filter(card => Math.max(...heights(card)) > 20).length;
const link = document.querySelector('a.skip'); link.focus(); seen.skip = link.getBoundingClientRect().left >= 0;
const fold = document.querySelector('details'); fold.querySelector('summary').click(); seen.unfolds = fold.open;
document.title = JSON.stringify(seen);</script>"""  # noqa: E501

pytestmark = needs_browser


def test_report_is_drawn_in_its_colours_fits_phone_and_unfolds_by_keys(checked, tmp_path):
    page = draw_page(document_with_drift(checked, run="hourly-1"))
    copy = tmp_path / "report.html"
    copy.write_text(page.replace("</body>", MEASURE + "</body>"), encoding="utf-8")
    drawn = browse(tmp_path, "--window-size=500,1400", DARK, "--dump-dom", copy.as_uri())
    seen = json.loads(re.search(r"<title>(.*?)</title>", drawn).group(1))
    # I2 has no value now, so its chart only shows the champion. All other charts also have bars.
    assert seen == {
        "overflow": False,
        "cards": NUM_CARDS,
        "paper": "rgb(18, 22, 28)",
        "ink": seen["ink"],
        "drawn": NUM_CARDS - 1,
        "skip": True,
        "unfolds": True,
    }
