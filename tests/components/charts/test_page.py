"""Pages for people stay on their screen, and never print a probability that does not exist."""

import json
import re

from components.charts.page import html_page, html_table, probability
from tests.support.browser import browse, needs_browser

LONG = "file:///home/somebody/evergreen_" + "of_a_long_name_" * 12 + "/scores.parquet"
MEASURE = (
    "<script>document.title=JSON.stringify([document.documentElement.scrollWidth,innerWidth,"
    "...[...document.querySelectorAll('.scroll')].map(box=>box.scrollWidth-box.clientWidth)])</script>"
)


@needs_browser
def test_a_long_uri_is_wrapped_wherever_it_stands(tmp_path):
    table = html_table(["setting", "value"], [["scores", LONG], [LONG, "1"]], caption="settings")
    page = html_page("A page", intro=f"<p>refused: {LONG}</p>", sections={"How": f"<p>{LONG}</p>{table}"})
    (tmp_path / "page.html").write_text(page.replace("</body>", MEASURE + "</body>"))
    told = browse(tmp_path, "--window-size=1300,900", "--dump-dom", (tmp_path / "page.html").as_uri())
    width, screen, *hidden = json.loads(re.search(r"<title>(.*?)</title>", told)[1])
    assert width <= screen
    assert hidden == [0], "pixels of a table that its box hides"


def test_no_p_value_is_printed_as_zero():
    assert [probability(value) for value in (0.0, 1e-12, 0.00009999, 0.0001)] == [*["< 0.0001"] * 3, "0.0001"]
