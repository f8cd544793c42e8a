"""Tests of the documentation site in a real browser, from a phone to a desktop, light and dark.

The tests are skipped unless `make docs` has built the site.
"""

import functools
import http.server
import re
import threading

import pytest

from testing.paths import REPOSITORY
from tests.support.browser import DARK, needs_browser, pixels_too_wide, serious_findings

SITE = REPOSITORY / "build" / "site"
pytestmark = [
    needs_browser,
    pytest.mark.slow,
    pytest.mark.skipif(not SITE.exists(), reason="`make docs` has built no site"),
]
PAGES = (
    "",
    "get-started/quickstart",
    "guides/monitor",
    "reference/commands",
    "reference/api/client",
    "operate/alerts/monitor",
)
WIDTHS = (360, 768, 1280)


class Quiet(http.server.SimpleHTTPRequestHandler):
    """HTTP request handler that logs nothing."""

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address():
    """Serve the site on a free port of this machine."""
    handler = functools.partial(Quiet, directory=SITE)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def page_of(address: str, name: str) -> str:
    """Return a page whose relative links lead to the served site."""
    text = (SITE / name / "index.html").read_text()
    return re.sub(r"<head>", f'<head><base href="{address}/{name}/">', text, count=1)


@pytest.mark.parametrize("name", PAGES)
def test_page_of_site_fits_every_screen_and_is_accessible(address, tmp_path, name):
    page = page_of(address, name)
    assert max(pixels_too_wide(tmp_path, page, *WIDTHS)) <= 0
    assert serious_findings(tmp_path, page) == []
    assert serious_findings(tmp_path, page, DARK) == []
