"""The page docs/recommender.md, which lists every key of a recommender's file.

`make golden` writes it. The description of each setting is its field's docstring. `config.sections`
names the classes.
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
"""Fields of a network that follow from the features. They are not settings."""
_MISSING_WORDS = ", ".join(f"`{word}`" for word in sorted(MISSING_WORDS - {""}))
_HEAD = f"""# The recommender's file

`recommender.yaml` describes one recommender. `evergreen recommender init DATA` drafts it from a click log, `check FILE`
says where it is wrong, `accept FILE --store STORE --why WHY` makes it the description by which the next rounds work.

A draft says of each column what it was taken for, and why. It proposes a key only if it is another in each row, a
column of times only if its values lie between 1990 and tomorrow, and no column that decides the label alone. Where only
you can know, it says `FILL IN` and asks in a comment; `check` refuses the file until that is answered. Up to 1,000,000
rows are read, and the draft says whether these are all.

`check FILE --data ROWS` tries the file on a file of rows, or a folder, as `ingest` would read them, and writes nothing.
It accounts for every line (rows, rejected, blank, header), names the first malformed rows, and says which days result,
how many clicks, users and categories there are, which rows repeat a key, and which column decides the label alone. It
ends with 1 if `ingest` would refuse the rows.

Every key of the sections is optional and has the default below. `make golden` writes this page from the code, and
beside it [recommender.schema.json](recommender.schema.json), by which editors complete and check a file that begins
with `# yaml-language-server: $schema=<path or address of the schema>`.

| Key | Meaning |
|---|---|
| `format` | `{FORMAT}`, required |
| `name` | of the served model, required: a lower-case letter, then up to 62 lower-case letters, digits or underscores |
| `data` | what the files call the columns that every row has |
| `features` | the columns to learn from, required |

`features` has three kinds of columns: `numeric` (numbers, stored as float32), `categorical` (whole numbers of 64 bits,
or texts) and `lists` of such. Each is a list of names, or names with options, such as
`price: {{transform: [clip(0..1000), minmax]}}` or `last_items: {{table: item_id, max: 20}}`; `I1..I13` stands for 13
names. In a text file a list is one field with `separator` (`|`) between its elements, or in brackets as JSON and Python
write lists; in Parquet it is a column of lists. Null, in a list too, is no element. Times cannot be learned from yet.
A file has at most 256 KiB, and its features come to at most 4,096 columns of tensors: one each, and one for each of a
list's `max` elements. YAML's aliases and tags are refused.

## What a value means

One value is one category in files, in the lake and in the client, however it is spelled:

- **Missing**: null, NaN, an empty text, and these texts, also with spaces around them: {_MISSING_WORDS}. A word that is
  spelled like one of them, such as the country code NA, needs another spelling.
- **Truth values**: `true` and `false` in any case, and booleans of Python, NumPy, Parquet and pandas: they are the
  categories 1 and 0, as other programs write them.
- **Whole numbers**: of 64 bits, signed or unsigned. A float that is whole is the same number up to 2^53. Beyond that
  one float stands for several numbers, so it is refused by name: write such ids as integers or texts. Floats of 32 bits
  are exact up to 2^24.
- **Words**: any other text, exactly as it is spelled.

## Columns that change

Columns may come, go and change their order between two rounds. A column of the same name must keep its kind and its
options. If it changes them, `accept` says so, and the next run ends at once with the column's name and prints the
command that trains from scratch. That is `evergreen run --from-scratch` where the live model cannot be asked about the
new rows, as when a number becomes a category: the new model continues no other (`parent=none`), and is judged by floor
and calibration alone (`champion=none`). With other options alone it is `-p parent=none`, and the new model is compared
with the live one. The lake's rows are read as the new kind if every value is one; else ingest them again into an empty
lake.

A store has one recommender. `accept` refuses a file with another name, or without any of the columns that the store's
recommender has: give it a store of its own, or replace the other one by `--replace` and `evergreen run --from-scratch`.

To add a column to a recommender that is in use:

1. `accept` the file with the new column, and restart the monitor: it archives the column from then on.
2. Let clients send it (`recommender=` the new file's copy). The live model leaves out what it does not take.
3. The next round learns from it, once a file of its window has it; rows of the days before count as missing it. A
   `standardize` or `minmax` is fitted to that round's rows, those without the column included, and stays.
4. The release needs nothing else: clients that do not send the column yet are answered as if it were missing.

To take one away, `accept` the file without it. The next round needs `-p champion=none` once, which it says: the live
model takes the column, and would be judged without it. Rename a column and it is a new one.
"""


def reference() -> str:
    """Return the page as Markdown."""
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
        only = f" Only of {', '.join(owners)}." if len(owners) < len(kinds) and section == "model" else ""
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
