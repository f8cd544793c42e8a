"""An HTML page parsed into its tags, for the tests of reports."""

import re
from html import unescape
from html.parser import HTMLParser

VOID = ("meta", "rect", "line", "circle", "polyline")


class _PageTags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parse_page(page: str) -> list[tuple[str, dict[str, str | None]]]:
    """Return every tag with its attributes, and assert that each is closed in order."""
    tags = _PageTags()
    tags.feed(page)
    assert tags.open == []
    return tags.seen


def assert_needs_nothing(page: str) -> None:
    """Assert that the page has no script, no other resource, and only links to its own anchors."""
    tags = parse_page(page)
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in tags}
    assert not [text for text in ("http", "url(", "@import") if text in page]
    links = [
        value
        for _, attributes in tags
        for name, value in attributes.items()
        if name in ("src", "href")
    ]
    assert links
    assert all(link.startswith("#") for link in links if link)


class _PageText(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self._texts: list[list[str]] = []
        self._rows: list[list[str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self._rows = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("caption", "th", "td"):
            self._texts.append([])

    def handle_endtag(self, tag: str) -> None:
        if tag == "caption":
            self.tables["".join(self._texts.pop())] = self._rows
        elif tag in ("th", "td"):
            self._rows[-1].append(" ".join("".join(self._texts.pop()).split()))

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self._texts:
            self._texts[-1].append(data)


def text_of(page: str) -> str:
    """Return all text of a page, with single spaces between words."""
    read = _PageText()
    read.feed(page)
    return " ".join(" ".join(read.words).split())


def table_of(page: str, caption: str) -> list[list[str]]:
    """Return the cell texts of the table with this caption, row by row.

    The first row contains the header.
    """
    read = _PageText()
    read.feed(page)
    return read.tables[caption]


def health_of(page: str) -> tuple[str, str]:
    """Return the tone and the text of the banner on a status page."""
    found = re.search(r'<div class="banner (\w+)" id="health">(.*?)</div>', page)
    return found[1], unescape(found[2])
