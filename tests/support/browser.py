"""A headless browser for the tests of pages."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from html import unescape

import pytest

from testing.paths import REPOSITORY

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
ABSENT = ("gpu", "quic", "background-networking", "component-update", "sync")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--no-first-run",
    "--hide-scrollbars",
    *(f"--disable-{each}" for each in ABSENT),
]

needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no chromium on this machine (Debian: apt install chromium)"
)


def browse(tmp_path, *flags: str) -> str:
    """Run the browser to its end and return its output."""
    # The browser runs without a session bus and without a display. The browser's profile is deleted
    # with the test.
    environment = {**os.environ, "HOME": str(tmp_path)}
    command = [BROWSER, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *flags]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=90, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


DARK = "--blink-settings=preferredColorScheme=0"
AXE = next(
    (REPOSITORY / ".venvs" / "driver").glob("lib/*/site-packages/axe_playwright_python/axe.min.js"),
    None,
)
_RUN_AXE = """<script>axe.run().then(found => document.title = JSON.stringify(found.violations
.filter(each => ['serious', 'critical'].includes(each.impact))
.map(each => [each.id, each.nodes[0].target[0], each.nodes[0].failureSummary])))</script>"""
_FRAME = '<iframe src="page.html" style="width:{}px;height:{}px;border:0"></iframe>'
FIRST_SCREENS = ((1280, 800), (360, 740))
"""Width and height of a laptop's window and of a phone's."""
_BEYOND = """<title></title><script>
const parts = 'header h1,header>.banner:first-of-type,header>figure,header>.checks tbody tr:nth-child(-n+4)';
const beyond = frame => [...frame.contentDocument.querySelectorAll(parts)]
  .filter(each => each.getBoundingClientRect().bottom > frame.clientHeight).map(each => each.textContent.trim());
onload = () => document.title = JSON.stringify(Array.from(document.querySelectorAll('iframe'), beyond));
</script>"""  # noqa: E501
_MEASURE = """<title></title><script>onload = () => document.title = JSON.stringify(
Array.from(document.querySelectorAll('iframe'), f => f.contentDocument.scrollingElement.scrollWidth - f.clientWidth))
</script>"""  # noqa: E501
_CUT = """<title></title><script>
const texts = 'h1,h2,p,li,th,td,dd,b,pre,code,a,caption,summary,text,figcaption,.badge,.banner';
function cut(frame) {
  frame.contentDocument.querySelectorAll('details').forEach(each => each.open = true);
  return [...frame.contentDocument.querySelectorAll(texts)].filter(each => {
    const box = each.getBoundingClientRect();
    const isHidden = each.closest('.skip') || getComputedStyle(each.closest('thead') || each).position == 'absolute';
    const isBox = getComputedStyle(each).display != 'inline' && !each.ownerSVGElement;
    return !isHidden && box.width && (isBox && each.scrollWidth > each.clientWidth + 1
      || box.right > frame.clientWidth + 1 || box.left < -1);
  }).map(each => each.textContent.trim().slice(0, 60));
}
onload = () => document.title = JSON.stringify(Array.from(document.querySelectorAll('iframe'), cut));
</script>"""  # noqa: E501


def pixels_too_wide(tmp_path, page: str, *widths: int) -> list[int]:
    """Return the number of pixels by which the page is too wide, for each screen width.

    A browser window is at least 500 pixels wide. The page is therefore loaded in frames of the
    given widths.
    """
    return _in_frames(tmp_path, page, [(width, 900) for width in widths], _MEASURE)


def beyond_first_screen(tmp_path, page: str) -> list[list[str]]:
    """Return the main parts of a page that need scrolling, for each screen size of `FIRST_SCREENS`.

    The main parts are the title, the state, the chart, and the first four rows of the checks.
    """
    return _in_frames(tmp_path, page, FIRST_SCREENS, _BEYOND)


def cut_texts(tmp_path, page: str, *widths: int) -> list[list[str]]:
    """Return the first characters of the texts that a page cuts off at each screen width.

    Texts that extend beyond the screen count as cut off. All foldable elements are unfolded first.
    """
    return _in_frames(tmp_path, page, [(width, 900) for width in widths], _CUT)


def _in_frames(tmp_path, page: str, sizes: Sequence[tuple[int, int]], script: str) -> list:
    (tmp_path / "page.html").write_text(page)
    (tmp_path / "frames.html").write_text(script + "".join(_FRAME.format(*size) for size in sizes))
    flags = [
        f"--window-size={max(sizes)[0] + 100},1000",
        "--allow-file-access-from-files",
        "--dump-dom",
    ]
    return json.loads(_title(browse(tmp_path, *flags, (tmp_path / "frames.html").as_uri())))


def serious_findings(tmp_path, page: str, *flags: str) -> list[list[str]]:
    """Return what axe-core reports as serious or critical in a page.

    Each finding contains the rule, the first affected element and the suggested fix.
    """
    if AXE is None:
        pytest.skip("axe-core is not installed (.venvs/driver)")
    (tmp_path / "page.html").write_text(
        page.replace("</body>", f"<script>{AXE.read_text()}</script>{_RUN_AXE}</body>")
    )
    flags = ("--window-size=1280,1000", "--virtual-time-budget=60000", *flags, "--dump-dom")
    return json.loads(_title(browse(tmp_path, *flags, (tmp_path / "page.html").as_uri())))


MARKUP = (
    """"'></title></style></textarea>--><img data-planted src=x onerror="document.body.dataset.ran = 1">"""  # noqa: E501
    """<script data-planted>document.body.dataset.ran = 1</script><a data-planted href="javascript:0">"""  # noqa: E501
)
"""Text that would become markup in any unescaped position: an attribute, a title or a cell."""
_LIST_PLANTED = """<script>onload = () => document.title = JSON.stringify([
document.body.innerText.split('<img data-planted').length - 1, ...(document.body.dataset.ran ? ['it ran'] : []),
...Array.from(document.querySelectorAll('[data-planted], [href^="javascript:"], [onerror]'), each => each.outerHTML)])
</script>"""  # noqa: E501


def planted(tmp_path, page: str) -> tuple[int, list[str]]:
    """Return how often a page shows `MARKUP` as text, and which of its parts became markup."""
    (tmp_path / "page.html").write_text(page.replace("</body>", f"{_LIST_PLANTED}</body>"))
    num_shown, *became_markup = json.loads(
        _title(browse(tmp_path, "--dump-dom", (tmp_path / "page.html").as_uri()))
    )
    return num_shown, became_markup


def _title(document: str) -> str:
    return unescape(re.search(r"<title>(.*?)</title>", document, re.DOTALL)[1])
