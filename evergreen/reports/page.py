"""HTML pages from typed blocks, with one frame and one style sheet.

A page is one file. The page works offline and without scripts, and fits a window with a width of
480 px. The first screen of a page shows the state, the chart of the AUC if there is one, and the
decision with its checks. All text is escaped, because no block accepts markup.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from evergreen.contracts.checks import Check
from evergreen.reports.rendering import PageBlock, render
from evergreen.reports.svg import BarChart

_TONES = {
    **dict.fromkeys(("pass", "ok", "released", "canary", "live"), "pass"),
    **dict.fromkeys(
        ("fail", "block", "failed", "refused", "retrain", "rollback", "blocked"), "fail"
    ),
    **dict.fromkeys(
        ("warn", "notify", "quarantine", "breach", "held", "inconclusive", "drifted"), "warn"
    ),
}
"""Colour of each result's badge. Results that are not listed get a neutral colour."""


class Text(PageBlock):
    """A paragraph of texts, badges, links and code."""

    TEMPLATE = "text.html.j2"

    def __init__(self, *parts: object, soft: bool = False, identifier: str = "") -> None:
        """Create a text from its parts. A soft paragraph is less prominent."""
        self.parts, self.soft, self.identifier = parts, soft, identifier


@dataclass(frozen=True)
class Badge(PageBlock):
    """Word with a coloured background."""

    TEMPLATE: ClassVar[str] = "badge.html.j2"
    text: str
    severity: str = ""
    """Word that selects the colour, such as `warn`. If `severity` is empty, the text of the badge
    selects the colour."""

    @property
    def tone(self) -> str:
        """Name of the colour in the style sheet."""
        return _TONES.get(self.severity or self.text, "info")


@dataclass(frozen=True)
class Link(PageBlock):
    """A link to another page or to a section."""

    TEMPLATE: ClassVar[str] = "link.html.j2"
    text: str
    address: str


@dataclass(frozen=True)
class Strong(PageBlock):
    """Emphasized text."""

    TEMPLATE: ClassVar[str] = "strong.html.j2"
    text: str
    tone: str = ""
    """The value `worse` marks text that is evidence against the model."""


@dataclass(frozen=True)
class Code(PageBlock):
    """A command or a path, shown as code."""

    TEMPLATE: ClassVar[str] = "code.html.j2"
    text: str


@dataclass(frozen=True)
class Preformatted(PageBlock):
    """Text whose line breaks are preserved."""

    TEMPLATE: ClassVar[str] = "preformatted.html.j2"
    text: str


@dataclass(frozen=True)
class Bullets(PageBlock):
    """A list of sentences."""

    TEMPLATE: ClassVar[str] = "bullets.html.j2"
    items: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Banner(PageBlock):
    """State or warning, in a box with a coloured edge."""

    TEMPLATE: ClassVar[str] = "banner.html.j2"
    text: str
    tone: str = ""
    """`good`, `warn` or `bad`. Other values give a neutral colour."""
    items: Sequence[str] = ()
    identifier: str = ""


@dataclass(frozen=True)
class Tiles(PageBlock):
    """A few numbers, each below its name."""

    TEMPLATE: ClassVar[str] = "tiles.html.j2"
    facts: Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class PageTable(PageBlock):
    """A table. The first cell of each row is the name of the row.

    With more than three columns, each row becomes a record in a narrow window.
    """

    TEMPLATE: ClassVar[str] = "table.html.j2"
    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[object]]
    numbers: Collection[int] = ()
    """Positions of the columns that hold numbers."""

    @property
    def width(self) -> str:
        """CSS class of the table.

        In a window that is too narrow for the table, each row is shown as a record. The class
        determines this width.
        """
        return "few" if len(self.head) <= 3 else "several" if len(self.head) <= 8 else "many"


def facts_table(facts: Mapping[str, object], *, caption: str) -> PageTable:
    """Return a table of names and values."""
    return PageTable(caption=caption, head=["what", "value"], rows=list(facts.items()))


@dataclass(frozen=True, kw_only=True)
class CheckRow:
    """One check of a decision."""

    name: str
    value: float | str | None
    """Measured value, or None if it is undefined."""
    interval: tuple[float, float] | None = None
    """95 % interval of the value, or None."""
    limit: str | None = None
    """Limit of the value, such as `at least 0.6`, or None."""
    result: str
    """Result of the check: `pass`, `fail`, `inconclusive`, or another word."""
    detail: str = ""
    """Explanation of the check, in addition to its numbers."""

    @property
    def badge(self) -> Badge:
        """Badge with the result."""
        return Badge(self.result)

    @property
    def is_good(self) -> bool:
        """Whether the result needs no attention."""
        return self.badge.tone == "pass"


def check_rows(checks: Iterable[Check]) -> list[CheckRow]:
    """Return the table rows of a decision's checks."""
    return [
        CheckRow(
            name=check.name,
            value=check.value,
            interval=check.interval,
            limit=check.limit_text,
            result=check.result,
            detail=f"{check.detail}." if check.detail else "",
        )
        for check in checks
    ]


@dataclass(frozen=True, kw_only=True)
class Checks(PageBlock):
    """Table of the checks of a decision.

    The details of checks that passed are shown when the reader unfolds them.
    """

    TEMPLATE: ClassVar[str] = "checks.html.j2"
    caption: str
    rows: Sequence[CheckRow]

    @property
    def folded(self) -> list[CheckRow]:
        """Rows with details that are hidden until the reader unfolds them."""
        return [row for row in self.rows if row.detail and row.is_good]


@dataclass(frozen=True)
class Fold(PageBlock):
    """Blocks that are shown when the reader unfolds them."""

    TEMPLATE: ClassVar[str] = "fold.html.j2"
    summary: str
    blocks: Sequence[PageBlock]


@dataclass(frozen=True, kw_only=True)
class Card:
    """Chart and facts of one column of the data."""

    name: str
    badge: Badge | None
    is_moved: bool
    """Whether the distribution of the column has changed."""
    texts: Sequence[str]
    chart: BarChart | None
    numbers: Fold | None
    """Numbers of the chart, for readers who cannot see it."""


@dataclass(frozen=True)
class Cards(PageBlock):
    """Cards that are arranged side by side.

    `is_compared` is True if the charts of the cards also have bars of earlier rows.
    """

    TEMPLATE: ClassVar[str] = "cards.html.j2"
    cards: Sequence[Card]
    is_compared: bool


def html_page(
    title: str,
    *,
    first: Iterable[PageBlock],
    sections: Mapping[str, Sequence[PageBlock]],
    badge: Badge | None = None,
    refresh_seconds: int | None = None,
) -> str:
    """Return the HTML page: title, badge, first screen, links to the sections, and sections.

    If `refresh_seconds` is set, a browser reloads the page at this interval.
    """
    drawn = {
        name.lower().replace(" ", "-").replace(",", ""): (name, blocks)
        for name, blocks in sections.items()
    }
    return render(
        "page.html.j2",
        title=title,
        badge=badge,
        first=list(first),
        sections=drawn,
        refresh_seconds=refresh_seconds,
    )


def refusal_page(step: str, reason: str) -> str:
    """Return the page of a step that refused its input before it wrote a report.

    Kubeflow shows an error if a step has no page.
    """
    return html_page(f"{step} refused", first=[Text(reason)], sections={}, badge=Badge("refused"))
