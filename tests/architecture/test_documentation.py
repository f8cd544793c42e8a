"""Checks that the targets of the pages exist: files, headings, `make` targets.

tests/loop/test_documents.py runs the pages' commands, and tests/cli/test_help.py parses them. Each
speed on a page must occur on docs/design/performance.md. A paragraph with an old speed must say
"not measured again since" and a date.
"""

import re
from pathlib import Path

import pytest

from benchmarks import page as performance
from benchmarks.__main__ import PLANS
from testing.paths import REPOSITORY

# Hidden folders and build/ contain ignored files. For example, .venvs/ contains a hundred thousand
# files.
PAGES = sorted(
    page
    for path in REPOSITORY.iterdir()
    if path.name[0] != "." and path.name != "build"
    for page in ([path] if path.suffix == ".md" else path.rglob("*.md"))
)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
NUMBER = r"\d[\d,]*(?:\.\d+)?"
SPEED = re.compile(
    rf"({NUMBER})(?: (?:to|and|or|against) ({NUMBER}))? (?:rows/s|rows per (?:\w+ "
    r")?second|requests/s\b"
    r"|times (?:as (?:fast|long)|faster|slower|quicker|longer|cheaper|lower|the "
    r"(?:processor|wall)))"
    r"|\b(\d[\d,]*\.\d+) m?s\b"
)
"""Pattern of measured speed: rates, multiples of another time, and times with decimals. Times
without decimals are settings, such as timeouts, so the pattern does not match them."""
OLD = re.compile(r"[Nn]ot\s+measured\s+again\s+since\s+\d{4}-\d\d-\d\d")


def anchors(page: Path) -> set[str]:
    """Return GitHub's anchors of a page's headings.

    Anchors are in lower case, with hyphens instead of spaces and without punctuation.
    """
    texts = HEADING.findall(FENCED.sub("", page.read_text()))
    return {
        re.sub(r"[^\w\- ]", "", text.lower().replace("`", "")).replace(" ", "-") for text in texts
    }


def commands(page: Path) -> str:
    """Return the code on a page: fenced, indented, or in backticks."""
    text = page.read_text()
    return "\n".join(
        [
            *re.findall(r"`([^`\n]+)`", text),
            *FENCED.findall(text),
            *re.findall(r"^    (.*)$", text, re.M),
        ]
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_to_existing_files_and_headings(page):
    for target in (
        first or second for first, second in LINK.findall(FENCED.sub("", page.read_text()))
    ):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target} does not exist"
        assert not anchor or anchor in anchors(file), f"{target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_make_targets_exist(page):
    text = commands(page)
    targets = set(
        re.findall(r"^([a-z][a-z-]*):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    )
    targets |= {f"benchmark-{name}" for name in PLANS}
    for target in re.findall(r"(?:^|[;&`|]\s*)make ([a-z][a-z-]+)", text, re.MULTILINE):
        assert target in targets, f"make target {target} does not exist"


def unsourced(text: str, results: dict[str, str]) -> list[str]:
    """Return the speeds in a paragraph that do not occur in the linked results.

    Figures in code are ignored. A table is part of the paragraph above it. A paragraph with "not
    measured again since" and a date needs no source.
    """
    prose = re.sub(r"^    .*$|`[^`\n]+`", "", FENCED.sub("", text), flags=re.MULTILINE)
    found = []
    for paragraph in re.split(r"\n\s*\n(?!\|)", prose):
        linked = " ".join(
            results.get(name, "") for name in re.findall(r"performance\.md#([\w-]+)", paragraph)
        )
        known = set(re.findall(NUMBER, linked))
        numbers = [number for figures in SPEED.findall(paragraph) for number in figures if number]
        found += [number for number in numbers if number not in known and not OLD.search(paragraph)]
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It learns 215,000 rows/s.\n\n[Measured](performance.md#training).", ["215,000"]),
        ("It learns 215,000 to 9 rows/s ([measured](performance.md#training)).", ["9"]),
        (
            "Not measured again since 2026-11-24:\n\n| it | takes |\n| this | 1.5 ms, 2 times as "
            "long |",
            [],
        ),
        ("It waits 5 s.\n\n    done in 1.5 s\n\n`1.5 ms`", []),
    ],
)
def test_figure_without_source_is_found(text, expected):
    assert unsourced(text, {"training": "| rate | 215,000 rows/s |"}) == expected


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_figures_of_speed_are_on_performance_page_or_marked_as_old(page):
    if page in (performance.PAGE, REPOSITORY / "CHANGELOG.md"):
        return
    results = {each["benchmark"]: performance.section(each) for each in performance.read_results()}
    assert unsourced(page.read_text(), results) == []


def test_performance_page_equals_stored_results():
    assert performance.PAGE.read_text() == performance.page(performance.read_results()), (
        "the page is not current; `make performance` writes it"
    )
