"""A first `recommender.yaml` for a click log: a guess at each column, with its reason, for people to correct.

The columns that this version cannot learn from are named in comments, with what is in the way. What the columns hold is
`sample`'s to say.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from components.contracts.features import Features
from components.contracts.raw_rows import EVENT_TIME, LABEL, OWN_COLUMNS, REQUEST_ID, ROW
from components.runtime.errors import ContractError
from pipelines.recommender_file.document import dump_text
from pipelines.recommender_file.form import FORMAT
from pipelines.recommender_file.sample import (
    BOOLEAN,
    FLOAT,
    INTEGER,
    LIST,
    OTHER,
    TEXT,
    TIME,
    ColumnSample,
    SampledColumn,
)

NUMERIC, CATEGORICAL, LISTS = KINDS = ("numeric", "categorical", "lists")
"""Kinds of features."""
LEFT_OUT = "left out"
MAX_ELEMENTS = 50
"""Most elements of a list that a draft proposes to count."""
MAX_FEW = 50
"""Distinct values of an integer column that still look like categories."""
_WEIGHT = "weight"
_USUAL_NAMES = {
    LABEL: ("label", "clicked", "click", "isclick", "isclicked", "target", "converted", "y"),
    EVENT_TIME: ("eventtime", "timestamp", "ts", "time", "datetime", "eventtimestamp", "clicktime", "date"),
    REQUEST_ID: ("requestid", "request", "impressionid", "impression", "searchid", "queryid", "sessionid", "listid"),
    ROW: ("row", "slot"),
    _WEIGHT: ("sampleweight", "exampleweight", "instanceweight", "importanceweight", "rowweight"),
}
"""What click logs call the columns that rows have, letters and digits only, the likeliest name first."""
_OF_CATEGORIES = re.compile(
    r"(?:^|_)(?:id|ids|code|type|kind|category|class|zip|brand|shop|item|user|device)$|[a-z]Id$"
)
_OF_NUMBERS = re.compile(
    r"(?:^|_)(?:num|count|cnt|n|age|price|amount|qty|quantity|days|hours|rate|ctr|score|rank)(?:_|$)"
)


class Guess(NamedTuple):
    """What a column may be."""

    role: str
    """A field of `ColumnNames`, a kind of features, or `LEFT_OUT`."""
    why: str
    options: str = ""
    """What a feature's line says beside its name."""


def draft(sample: ColumnSample, *, name: str) -> str:
    """The text of a file with a comment on each column, sound once what it asks for is filled in.

    Raises:
        ContractError: no column can be a feature.
    """
    guesses = guess_roles(sample.columns)
    if not any(guess.role in KINDS for _, guess in guesses):
        reasons = "; ".join(f"{column.name}: {guess.why}" for column, guess in guesses if guess.role == LEFT_OUT)
        raise ContractError(f"{sample.path} has no column that can be a feature: {reasons}")
    ragged = f", {sample.num_ragged:,} lines with another number of fields aside" if sample.num_ragged else ""
    rows = f"the first {sample.num_rows:,} rows of {sample.path.name!r}{ragged}"
    lines = [
        f"# Drafted by `evergreen recommender init` from {rows}.",
        "# The columns' roles are guesses. Correct them, then: evergreen recommender check FILE",
        f"format: {FORMAT}",
        f"name: {name}",
        "",
        "# What the files call the columns that every row has.",
        "data:",
    ]
    by_role = {guess.role: (column, guess) for column, guess in guesses}
    lines += [_line_of_role(role, by_role.get(role)) for role in _USUAL_NAMES if role != _WEIGHT or role in by_role]
    lines += ["", "# The columns to learn from.", "features:"]
    for kind in KINDS:
        of_kind = [(column, guess) for column, guess in guesses if guess.role == kind]
        if kind == LISTS and not of_kind:
            continue
        lines += [f"  {kind}:"] if of_kind else [f"  {kind}: []  # none found"]
        lines += _aligned([(_line_of_feature(each, of_kind), _remark(*each)) for each in of_kind])
    if left := [(column, guess) for column, guess in guesses if guess.role == LEFT_OUT]:
        lines += ["", "# Left out:"]
        lines += [f"#   {_printable(column.name)}: {_remark(column, guess)}" for column, guess in left]
    lines += [
        "",
        "# Every setting has a default, listed in docs/recommender.md. Another value is said so:",
        "# training:",
        "#   learning_rate: 0.003",
    ]
    return "\n".join(lines) + "\n"


def _line_of_feature(feature: tuple[SampledColumn, Guess], of_kind: Sequence[tuple[SampledColumn, Guess]]) -> str:
    """One of a list of names, or of names with options where a feature of the kind has some."""
    name = dump_text(feature[0].name)
    if any(guess.options for _, guess in of_kind):
        return f"    {name}: {feature[1].options or '{}'}"
    return f"    - {name}"


def recommender_name(text: str) -> str:
    """A name that a recommender can have, made of `text`.

    >>> recommender_name("My Clicks-2026"), recommender_name("2026")
    ('my_clicks_2026', 'recommender')
    """
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")[:63].lstrip("0123456789_") or "recommender"


def guess_roles(columns: Sequence[SampledColumn]) -> list[tuple[SampledColumn, Guess]]:
    """A guess at each column, in their order."""
    taken: dict[str, Guess] = {}
    for role, looks_so, otherwise in (
        (LABEL, _is_label, "the first column that holds only 0 and 1"),
        (EVENT_TIME, _is_time, "the first column of times"),
        (REQUEST_ID, _is_request, None),
        (ROW, _is_row, None),
        (_WEIGHT, _is_weight, None),
    ):
        if role == ROW and not any(guess.role == REQUEST_ID for guess in taken.values()):
            continue
        free = [column for column in columns if column.name not in taken and looks_so(column)]
        named = [column for usual in _USUAL_NAMES[role] for column in free if _letters(column.name) == usual]
        if named:
            taken[named[0].name] = Guess(role, "by its name")
        elif free and otherwise:
            taken[free[0].name] = Guess(role, otherwise)
    return [(column, taken.get(column.name) or _guess_feature(column)) for column in columns]


def _is_label(column: SampledColumn) -> bool:
    is_flag = column.kind == INTEGER and {column.low, column.high} <= {0, 1}
    return column.missing == 0 and (is_flag or column.kind == BOOLEAN)


def _is_time(column: SampledColumn) -> bool:
    return column.kind == TIME and column.missing == 0


def _is_request(column: SampledColumn) -> bool:
    return column.kind in (INTEGER, TEXT) and column.missing == 0


def _is_row(column: SampledColumn) -> bool:
    return column.kind == INTEGER and column.missing == 0 and column.low >= 0


def _is_weight(column: SampledColumn) -> bool:
    return column.kind in (INTEGER, FLOAT) and column.missing == 0 and 0 <= column.low <= column.high < math.inf


def _guess_feature(column: SampledColumn) -> Guess:
    if column.name in OWN_COLUMNS:
        return Guess(LEFT_OUT, "rows have a column of this name beside their features; rename it to learn from it")
    if not _is_name(column.name):
        return Guess(LEFT_OUT, "a feature has a printable name without a slash and without spaces around it; rename it")
    if column.distinct is not None and column.distinct < 2:
        return Guess(LEFT_OUT, "it says nothing, being the same in all rows")
    if column.kind == TEXT:
        return Guess(CATEGORICAL, "texts", _WORDS)
    if column.kind == TIME:
        return Guess(LEFT_OUT, "times cannot be learned from yet; write hours, days or ages as numbers")
    if column.kind == LIST:
        most = min(column.longest or 1, MAX_ELEMENTS)
        beyond = f", the newest {most} of {column.longest} count" if most != column.longest else ""
        why = f"a list{beyond}; `table: NAME` shares the vectors of a categorical feature"
        return Guess(LISTS, why, f"{{type: string, max: {most}}}" if column.type == TEXT else f"{{max: {most}}}")
    if column.kind == OTHER:
        return Guess(LEFT_OUT, f"columns of type {column.type} cannot be learned from yet")
    if column.kind == BOOLEAN:
        return Guess(CATEGORICAL, "true or false", _WORDS)
    if column.kind == FLOAT:
        if not (math.isfinite(column.low) and math.isfinite(column.high)):
            return Guess(LEFT_OUT, "infinite values cannot be learned from; leave them empty")
        return Guess(NUMERIC, "numbers with fractions", _BELOW_ZERO if column.low < 0 else "")
    return _guess_integer(column)


_WORDS = "{type: string}"
"""Of a categorical feature with other values than whole numbers."""
_BELOW_ZERO = "{transform: [standardize]}"
"""Of a numeric feature with values below 0, which the usual transform takes for 0."""


def _is_name(name: str) -> bool:
    try:
        Features(numeric=(name,), categorical=())
    except ContractError:
        return False
    return True


def _guess_integer(column: SampledColumn) -> Guess:
    is_named_so = _OF_CATEGORIES.search(column.name) is not None
    if is_named_so:
        return Guess(CATEGORICAL, "whole numbers, named like a category")
    if column.low < 0:
        return Guess(NUMERIC, "it has values below 0", _BELOW_ZERO)
    assert column.distinct is not None
    if column.distinct <= MAX_FEW and not _OF_NUMBERS.search(column.name.lower()):
        return Guess(CATEGORICAL, "whole numbers, and few of them")
    return Guess(NUMERIC, "whole numbers, not named like a category")


def _line_of_role(role: str, found: tuple[SampledColumn, Guess] | None) -> str:
    if found:
        column, guess = found
        return f"  {role}: {dump_text(column.name)}  # {_remark(column, guess)}"
    absent = {
        LABEL: "FILL IN: no column holds only 0 and 1",
        EVENT_TIME: "none found: `evergreen ingest` gives the rows times",
        REQUEST_ID: "none found: each row is a request of its own",
        ROW: "none found: the rows of a request are numbered in their order",
    }
    return f"  {'' if role == LABEL else '# '}{role}: {role}  # {absent[role]}"


def _remark(column: SampledColumn, guess: Guess) -> str:
    said = [column.type]
    if column.type == TEXT or column.kind == LIST:
        said = [f"list of {column.type}s" if column.kind == LIST else column.kind]
    if column.missing:
        said.append(f"{column.missing:.1%} missing")
    if column.distinct is not None:
        said.append(f"{column.distinct:,} distinct value{'' if column.distinct == 1 else 's'}")
    if column.low is not None:
        said[-1] += f", {column.low} to {column.high}"
    elif column.example:
        said[-1] += f" such as {_printable(column.example)}"
    return f"{'; '.join(said)}. {guess.why.capitalize()}"


def _printable(text: str) -> str:
    return text if text.isprintable() else repr(text)


def _aligned(lines: Sequence[tuple[str, str]]) -> list[str]:
    width = min(max(len(text) for text, _ in lines), 40) if lines else 0
    return [f"{text:<{width}}  # {remark}" for text, remark in lines]


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
