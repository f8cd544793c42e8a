"""Pages for people: typed parts, drawn by templates in one frame with one style sheet.

A page is one file, readable in a pane 480 px wide and on a phone, without a network and without a script. Its first
screen answers whether all is well and what was done: the state, the chart of the AUC where there is one, and the
decision with its checks. Every text is escaped, because no part takes markup.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from evergreen.contracts.checks import Check
from evergreen.reports.rendering import PageBlock, render
from evergreen.reports.svg import BarChart

_TONES = {
    **dict.fromkeys(("pass", "ok", "released", "canary"), "pass"),
    **dict.fromkeys(("fail", "block", "failed", "refused", "retrain", "rollback"), "fail"),
    **dict.fromkeys(("warn", "notify", "quarantine", "breach", "held", "inconclusive", "drifted"), "warn"),
}
"""Colour of a result's badge; others are neutral."""


class Text(PageBlock):
    """A paragraph of texts, badges, links and code, one after the other."""

    TEMPLATE = "text.html.j2"

    def __init__(self, *parts: object, soft: bool = False, identifier: str = "") -> None:
        """Keep the parts; a soft paragraph is less prominent."""
        self.parts, self.soft, self.identifier = parts, soft, identifier


@dataclass(frozen=True)
class Badge(PageBlock):
    """A word on a coloured ground."""

    TEMPLATE: ClassVar[str] = "badge.html.j2"
    text: str
    severity: str = ""
    """Word that decides the colour, such as `warn`; empty = the text itself."""

    @property
    def tone(self) -> str:
        """The colour's name in the style sheet."""
        return _TONES.get(self.severity or self.text, "info")


@dataclass(frozen=True)
class Link(PageBlock):
    """A link of a page to another one, or to a section."""

    TEMPLATE: ClassVar[str] = "link.html.j2"
    text: str
    address: str


@dataclass(frozen=True)
class Strong(PageBlock):
    """Text that stands out."""

    TEMPLATE: ClassVar[str] = "strong.html.j2"
    text: str
    tone: str = ""
    """`worse` = what it says speaks against the model."""


@dataclass(frozen=True)
class Code(PageBlock):
    """A command or a path."""

    TEMPLATE: ClassVar[str] = "code.html.j2"
    text: str


@dataclass(frozen=True)
class Preformatted(PageBlock):
    """Lines that keep their breaks."""

    TEMPLATE: ClassVar[str] = "preformatted.html.j2"
    text: str


@dataclass(frozen=True)
class Bullets(PageBlock):
    """A list of sentences."""

    TEMPLATE: ClassVar[str] = "bullets.html.j2"
    items: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Banner(PageBlock):
    """A state, or a warning, with a coloured edge."""

    TEMPLATE: ClassVar[str] = "banner.html.j2"
    text: str
    tone: str = ""
    """`good`, `warn`, `bad`, or another word for neutral."""
    items: Sequence[str] = ()
    identifier: str = ""


@dataclass(frozen=True)
class Tiles(PageBlock):
    """Few numbers, each under its name."""

    TEMPLATE: ClassVar[str] = "tiles.html.j2"
    facts: Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class PageTable(PageBlock):
    """A table; the first cell names its row. With more than three columns, rows become records in a narrow pane."""

    TEMPLATE: ClassVar[str] = "table.html.j2"
    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[object]]
    numbers: Collection[int] = ()
    """Positions of the columns that hold numbers."""

    @property
    def width(self) -> str:
        """Class that says below which width rows become records."""
        return "few" if len(self.head) <= 3 else "several" if len(self.head) <= 8 else "many"


def facts_table(facts: Mapping[str, object], *, caption: str) -> PageTable:
    """Return a table of names and values."""
    return PageTable(caption=caption, head=["what", "value"], rows=list(facts.items()))


@dataclass(frozen=True, kw_only=True)
class CheckRow:
    """One check of a decision."""

    name: str
    value: float | str | None
    """What was measured; None = it does not exist."""
    interval: tuple[float, float] | None = None
    """Its 95 % interval; None = it has none."""
    limit: str | None = None
    """What the value is compared with, such as `at least 0.6`; None = nothing."""
    result: str
    """`pass`, `fail`, `inconclusive`, or the decider's own word."""
    detail: str = ""
    """What the numbers do not say, in a sentence about this check alone."""

    @property
    def badge(self) -> Badge:
        """The result on its colour."""
        return Badge(self.result)


def check_rows(checks: Iterable[Check]) -> list[CheckRow]:
    """Return the checks of a decision as rows of its table."""
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
    """A decision as the table of its checks."""

    TEMPLATE: ClassVar[str] = "checks.html.j2"
    caption: str
    rows: Sequence[CheckRow]


@dataclass(frozen=True)
class Fold(PageBlock):
    """Blocks that are shown on demand."""

    TEMPLATE: ClassVar[str] = "fold.html.j2"
    summary: str
    blocks: Sequence[PageBlock]


@dataclass(frozen=True, kw_only=True)
class Card:
    """One column of the data: a chart, and what is known of it."""

    name: str
    badge: Badge | None
    is_moved: bool
    """Whether it has to be looked at."""
    texts: Sequence[str]
    chart: BarChart | None
    numbers: Fold | None
    """The chart's numbers, for those who cannot see it."""


@dataclass(frozen=True)
class Cards(PageBlock):
    """Cards side by side, as many as fit; `is_compared` = their charts have bars of earlier rows."""

    TEMPLATE: ClassVar[str] = "cards.html.j2"
    cards: Sequence[Card]
    is_compared: bool


def html_page(
    title: str,
    *,
    first: Iterable[PageBlock],
    sections: Mapping[str, Sequence[PageBlock]],
    decision: str = "",
    refresh_seconds: int | None = None,
) -> str:
    """Return the page: title and decision, the first screen, links to the sections, and the sections by name.

    A browser loads it again every `refresh_seconds`.
    """
    drawn = {name.lower().replace(" ", "-").replace(",", ""): (name, blocks) for name, blocks in sections.items()}
    badge = Badge(decision) if decision else None
    return render(
        "page.html.j2", title=title, badge=badge, first=list(first), sections=drawn, refresh_seconds=refresh_seconds
    )


def refusal_page(step: str, reason: str) -> str:
    """Return the page of a step that refused before it had a report: Kubeflow shows an error for an absent one."""
    return html_page(f"{step} refused", first=[Text(reason)], sections={}, decision="refused")
