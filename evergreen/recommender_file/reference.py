"""Generator of the page docs/recommender.md, which lists every key of a recommender's file.

`make golden` writes it. The description of each setting is its field's docstring. The module
`config.sections` provides the dataclasses.
"""

import dataclasses
import inspect
import json
from collections.abc import Iterator
from typing import Any, get_type_hints

from evergreen.config.data import ColumnNames
from evergreen.config.reader import field_docstrings
from evergreen.config.sections import section_classes
from evergreen.config.spec import SECTIONS
from evergreen.contracts.values import MISSING_WORDS
from evergreen.recommender_file.form import FORMAT, OPTIONS

OF_FEATURES = ("num_dense", "num_categorical", "widths")
"""Fields of a network's configuration that follow from the features. Users cannot set these
fields."""
_MISSING_WORDS = ", ".join(f"`{word}`" for word in sorted(MISSING_WORDS - {""}))
_HEAD = f"""# The recommender's file

`recommender.yaml` describes one recommender. `evergreen init DATA` drafts it from a
click log, and `check FILE` reports its mistakes. `accept FILE --store STORE --why WHY` makes it the
description for the next runs.

A draft states the role of each column and the reason. It proposes a key only if the key differs in
each row, and a time column only if its values are between 1990 and tomorrow. It proposes no column
that alone determines the label. Where only you can know the answer, it says `FILL IN` and asks in a
comment. `check` refuses the file until you have answered. At most 1,000,000 rows are read, and the
draft says whether these are all rows.

`check FILE --data ROWS` tries the file on a file of rows, or a folder, as `ingest` would read them,
and writes nothing. It counts every line (rows, rejected, blank, header) and names the first
malformed rows. It reports the resulting days, the number of clicks, users and categories, rows that
repeat a key, and columns that alone determine the label. It ends with 1 if `ingest` would refuse
the rows.

Every key of the sections is optional and has the default below. `make golden` generates this page
from the code, and also [recommender.schema.json](recommender.schema.json). With this schema,
editors complete and check a file that begins with
`# yaml-language-server: $schema=<path or address of the schema>`.

| Key | Meaning |
|---|---|
| `format` | `{FORMAT}`, required |
| `name` | Name of the served model, required: a lower-case letter, then up to 62 of a-z, 0-9 or _ |
| `data` | Names that the files give to the columns of every row |
| `features` | Columns to train on, required |

`features` has three kinds of columns: `numeric` (numbers, stored as float32), `categorical` (whole
numbers of 64 bits, or texts) and `lists` of categories. Each is a list of names, or names with
options, such as `price: {{transform: [clip(0..1000), minmax]}}` or
`last_items: {{table: item_id, max: 20}}`. `I1..I13` means 13 names. In a text file a list is one
field with `separator` (`|`) between its elements, or in brackets as JSON and Python write lists. In
Parquet it is a column of lists. Null is no element, also inside a list. Times are not supported as
features yet. A file has at most 256 KiB, and its features need at most 4,096 tensor columns: one
for each feature, and one for each of a list's `max` elements. YAML's aliases and tags are refused.

## What a value means

A value is the same category in files, in the lake and in the client, however it is spelled:

- **Missing**: null, NaN, an empty text, and the following texts, also with spaces around them:
  {_MISSING_WORDS}. A value that is spelled like one of them, such as the country code NA, needs
  another spelling.
- **Truth values**: `true` and `false` in any case, and booleans of Python, NumPy, Parquet and
  pandas. They are the categories 1 and 0, as other programs write them.
- **Whole numbers**: 64 bits, signed or unsigned. A whole float is the same number up to 2^53.
  Beyond that several numbers have the same float, so it is refused: write such ids as integers or
  texts. Floats of 32 bits are exact up to 2^24.
- **Texts**: any other text, exactly as it is spelled.

## Columns that change

Columns may be added, removed and reordered between two runs. A column of the same name must keep
its kind and its options. If it changes them, `accept` warns. The next run then ends at once, names
the column, and prints the command that trains from scratch:

- `evergreen run --from-scratch` if the live model cannot score the new rows, for example because a
  number became a category. The new model has no parent (`parent=none`), and is evaluated by its
  minimum AUC and calibration alone (`champion=none`).
- `-p parent=none` if only options changed. The new model is compared with the live one.

The lake's rows are read as the new kind if every value fits. Otherwise ingest them again into an
empty lake.

A model registry has one recommender. `accept` refuses a file with another name, or with none of the
registered recommender's columns. Use another registry, or replace the recommender with `--replace`
and `evergreen run --from-scratch`.

To add a column to a recommender in use:

1. `accept` the file with the new column, and restart the monitor. It archives the column from then
   on.
2. Let clients send it (`recommender=` a copy of the new file). The live model ignores it.
3. The next run trains on it, once a file of its window has it. In rows of earlier days it is
   missing. A `standardize` or `minmax` is fitted to all rows of that run, and then stays.
4. The release needs no other change. If a client does not send the column yet, it is missing.

To remove a column, `accept` the file without it. The next run needs `-p champion=none` once, and
says so, because the live model uses the column and would be evaluated without it. A renamed column
is a new column.
"""


def reference() -> str:
    """Return the text of the page in Markdown."""
    parts = [_HEAD, _table("data", [ColumnNames])]
    parts += [_table(f"features.{kind}", [options]) for kind, options in OPTIONS.items()]
    parts += [_table(name, section_classes(name)) for name in SECTIONS]
    return "\n".join(parts)


def _table(section: str, kinds: list[type[Any]]) -> str:
    lines = [f"## {section}", "", "| Key | Type | Default | Meaning |", "|---|---|---|---|"]
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
        default = field.default if make is dataclasses.MISSING else make()
        meaning = texts.get(field.name, "").replace("|", "\\|")
        type_name = inspect.formatannotation(hints[field.name]).replace("|", "\\|")
        yield f"| `{prefix}{field.name}` | {type_name} | `{json.dumps(default)}` | {meaning}"


if __name__ == "__main__":
    print(reference(), end="")
