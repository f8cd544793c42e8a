"""Tables of every key of a recommender's file, for docs/reference/settings.md.

`cli.reference_pages` writes the page. The description of each setting is its field's docstring.
`config.sections` names the classes.
"""

import dataclasses
import inspect
import json
import re
from collections.abc import Iterator
from typing import Any, get_type_hints

from evergreen.config.data import ColumnNames
from evergreen.config.reader import field_docstrings
from evergreen.config.sections import section_classes
from evergreen.config.spec import SECTIONS
from evergreen.recommender_file.form import OPTIONS

OF_FEATURES = ("num_dense", "num_categorical", "widths")
"""Fields of a network's configuration whose values are computed from the features. Users cannot set
these fields."""
_HEAD = """## Sections of the recommender's file

Every key is optional and has the default below. [The recommender's file](recommender-file.md)
describes the keys `format`, `name`, `data` and `features`.
"""


def reference() -> str:
    """Return the tables of all sections as Markdown."""
    parts = [_HEAD, settings_table("data", [ColumnNames])]
    parts += [settings_table(f"features.{kind}", [options]) for kind, options in OPTIONS.items()]
    parts += [settings_table(name, section_classes(name)) for name in SECTIONS]
    return "\n".join(parts)


def settings_table(section: str, kinds: list[type[Any]], text: str = "") -> str:
    """Return a heading, and a table with the settings of several dataclasses.

    A setting that only some of the networks have is marked in section `model`.
    """
    lines = [
        f"### {section}",
        "",
        *([text, ""] if text else []),
        "| Key | Type | Default | Meaning |",
        "|---|---|---|---|",
    ]
    if section == "model":
        names = ", ".join(kind.network for kind in kinds)
        lines.append(f'| `kind` | str | `"{kinds[0].network}"` | The network: {names}. |')
    rows: dict[str, list[str]] = {}
    for kind in kinds:
        for row in _rows(kind):
            rows.setdefault(row, []).append(getattr(kind, "network", ""))
    for row, owners in rows.items():
        only = (
            f" Only of {', '.join(owners)}."
            if len(owners) < len(kinds) and section == "model"
            else ""
        )
        lines.append(f"{row}{only} |")
    return "\n".join(lines) + "\n"


def _rows(kind: type[Any], prefix: str = "") -> Iterator[str]:
    texts, hints = field_docstrings(kind), get_type_hints(kind)  # type: ignore[arg-type]
    for field in dataclasses.fields(kind):
        if field.name in OF_FEATURES:
            continue
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _rows(hints[field.name], f"{prefix}{field.name}.")
            continue
        make: Any = field.default_factory
        default = _default(field.default if make is dataclasses.MISSING else make())
        meaning = texts.get(field.name, "").replace("|", "\\|")
        type_name = type_text(hints[field.name])
        yield f"| `{prefix}{field.name}` | {type_name} | {default} | {meaning}"


def type_text(hint: object) -> str:
    """Convert a type to text without module names, for a cell of a table."""
    text = inspect.formatannotation(hint)
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", text).replace("|", "\\|")


def _default(value: object) -> str:
    if value is dataclasses.MISSING:
        return "required"
    return f"`{json.dumps(value)}`"
