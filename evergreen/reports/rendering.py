"""Templates of pages: Jinja2 with escaping always on, read from the package's own files."""

import re
from importlib.resources import files
from typing import ClassVar

from jinja2 import Environment, FunctionLoader, StrictUndefined

from evergreen.reports import formats

_PACKAGE = files(__package__)
STYLE = _PACKAGE.joinpath("style.css").read_text(encoding="utf-8")
_BREAKABLE = 20
"""Longest word that a cell must show in one line; a longer one, such as a URI, breaks anywhere."""
_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")
_LONG = 40
"""Characters from which a cell takes a row of its own in a narrow pane."""


def _cell_class(value: object, is_number: bool) -> str:
    """Return the classes that say how a cell wraps."""
    text = value if isinstance(value, str) else ""
    classes = ["number"] if is_number else []
    classes += ["time"] if _TIME.fullmatch(text) else []
    classes += ["breakable"] if any(len(word) > _BREAKABLE for word in text.split()) else []
    classes += ["long"] if len(text) > _LONG else []
    return " ".join(classes)


_ENVIRONMENT = Environment(
    loader=FunctionLoader(lambda name: _PACKAGE.joinpath("templates", name).read_text(encoding="utf-8")),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters["number"] = formats.number
_ENVIRONMENT.filters["cell_class"] = _cell_class
_ENVIRONMENT.globals["style"] = STYLE


def render(template: str, **values: object) -> str:
    """Return the text of a template with these values, each escaped unless it is a `PageBlock`."""
    return _ENVIRONMENT.get_template(template).render(values)


class PageBlock:
    """A part of a page that its own template draws, wherever another template or a cell contains it."""

    TEMPLATE: ClassVar[str]
    """File in the folder of templates, which reads the block as `block`."""

    def __html__(self) -> str:
        """Return the markup; Jinja2 calls this instead of escaping."""
        return render(self.TEMPLATE, block=self)
