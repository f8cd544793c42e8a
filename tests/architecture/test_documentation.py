"""What the pages point at exists: files, headings, `make` targets, `evergreen` commands.

Commands that a page promises to work as they stand are run by tests of their own (docs/serving.md, docs/runbook.md).
"""

import re
from pathlib import Path

import pytest

from pipelines.__main__ import ROOMS, build_parser
from tests.support.paths import REPOSITORY

# Hidden folders and build/ hold what git ignores, and .venvs/ a hundred thousand files.
PAGES = sorted(
    page
    for path in REPOSITORY.iterdir()
    if path.name[0] != "." and path.name != "build"
    for page in ([path] if path.suffix == ".md" else path.rglob("*.md"))
)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings: lower case, spaces as hyphens, other marks dropped."""
    texts = HEADING.findall(FENCED.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", text.lower().replace("`", "")).replace(" ", "-") for text in texts}


def commands(page: Path) -> str:
    """What a page shows as code: fenced, indented, or in backticks."""
    text = page.read_text()
    return "\n".join([*re.findall(r"`([^`\n]+)`", text), *FENCED.findall(text), *re.findall(r"^    (.*)$", text, re.M)])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_to_files_and_headings_that_are_there(page):
    for target in (first or second for first, second in LINK.findall(FENCED.sub("", page.read_text()))):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target} leads nowhere"
        assert not anchor or anchor in anchors(file), f"{target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_make_targets_and_evergreen_commands_exist(page):
    text = commands(page)
    targets = set(re.findall(r"^([a-z][a-z-]*):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"(?:^|[;&`|]\s*)make ([a-z][a-z-]+)", text, re.MULTILINE):
        assert target in targets, f"make {target}"
    subparsers = build_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    for command in re.findall(r"(?:^|[;&`|]\s*|\$ )evergreen ([a-z][a-z-]+)", text, re.MULTILINE):
        assert command in subparsers or command in ROOMS, f"evergreen {command}"
