"""Templates of pages: Jinja2 with escaping always on. The templates are files of this package."""

import re
from importlib.resources import files
from typing import ClassVar

from jinja2 import Environment, FunctionLoader, StrictUndefined

from evergreen.reports import formats

_PACKAGE = files(__package__)
STYLE = _PACKAGE.joinpath("style.css").read_text(encoding="utf-8")
_BREAKABLE = 20
"""Length of the longest word that a cell shows in one line. A longer word, such as a URI, may be
broken at any character."""
_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")
_LONG = 40
"""Maximum length of a short cell in characters. In a narrow window, a longer cell gets its own
line."""


def _cell_class(value: object, is_number: bool) -> str:
    """Return the CSS classes that control how a cell wraps."""
    text = value if isinstance(value, str) else ""
    classes = ["number"] if is_number else []
    classes += ["time"] if _TIME.fullmatch(text) else []
    classes += ["breakable"] if any(len(word) > _BREAKABLE for word in text.split()) else []
    classes += ["long"] if len(text) > _LONG else []
    return " ".join(classes)


_ENVIRONMENT = Environment(
    loader=FunctionLoader(
        lambda name: _PACKAGE.joinpath("templates", name).read_text(encoding="utf-8")
    ),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters["number"] = formats.number
_ENVIRONMENT.filters["cell_class"] = _cell_class
_ENVIRONMENT.globals["style"] = STYLE


def render(template: str, **values: object) -> str:
    """Render a template. All values except a `PageBlock` are escaped."""
    return _ENVIRONMENT.get_template(template).render(values)


class PageBlock:
    """Part of a page.

    Each class of parts has its own template. Templates and table cells can contain a block.
    """

    TEMPLATE: ClassVar[str]
    """Template file. The template refers to the block as `block`."""

    def __html__(self) -> str:
        """Return the markup. Jinja2 calls this method and does not escape its result."""
        return render(self.TEMPLATE, block=self)
