"""An HTML page as its tags, for the tests of reports."""

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
    """Every tag with its attributes; each must be closed in its turn."""
    tags = _PageTags()
    tags.feed(page)
    assert tags.open == []
    return tags.seen


def assert_needs_nothing(page: str) -> None:
    """The page runs no script, fetches nothing, and its links lead inside itself."""
    tags = parse_page(page)
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in tags}
    assert not [text for text in ("http", "url(", "@import") if text in page]
    links = [value for _, attributes in tags for name, value in attributes.items() if name in ("src", "href")]
    assert links
    assert all(link.startswith("#") for link in links if link)
