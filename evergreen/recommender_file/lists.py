"""Detection of lists in the texts of a column, and of the separator between their elements."""

import re
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from evergreen.recommender_file import names
from evergreen.recommender_file.columns import (
    ELEMENT_END,
    FLOAT,
    INTEGER,
    TEXT,
    TOLERATED,
    SampledColumn,
)
from evergreen.rows.values import CATEGORIES, NUMBERS, STRINGS, ListRule

BRACKETS = "[]"
"""Value of `separator` for lists that need no separator: Parquet lists, and texts with brackets, as
in JSON or Python."""
OBJECTS, DECIMAL_COMMA = "objects", "decimal comma"
"""Reasons why texts of a column cannot be used as lists."""
_MAX_INSPECTED = 20_000
_SEPARATED_SHARE = 0.25
"""A column looks like lists if at least this share of its distinct texts contains a separator."""
_MIN_REPEATS = 3.0
"""Minimum average number of times that an element occurs. If elements occur this often, a column of
texts with a separator is a list column, whatever its name is."""
_MAX_LETTERS = 40
"""Maximum number of characters of an element. A longer text is assumed to be a sentence."""


@dataclass(frozen=True, kw_only=True)
class ListLooks:
    """Result of a search for lists in the texts of a column."""

    separator: str | None = None
    """Separator between the elements, or `BRACKETS`. None if the texts are not lists."""
    element: str = TEXT
    """Kind of the elements."""
    num_elements: int = 0
    """Number of distinct elements."""
    longest: int = 1
    """Number of elements of the longest list."""
    problem: str | None = None
    remark: str = ""
    """Remark for a column whose texts may be lists, although the reader found no lists."""


def look_at_lists(column: SampledColumn) -> ListLooks:
    """Return whether a column's values are lists, and the kind of their elements."""
    texts = column.values.filter(pa.array(column.is_present)).cast(pa.string())
    if column.is_list:
        return _looks(texts, ELEMENT_END, shown=BRACKETS)
    sample = pc.utf8_trim_whitespace(texts.slice(0, _MAX_INSPECTED))
    if _share(sample, r"^\[.*\]$") > 1 - TOLERATED:
        return _looks(texts, "|", shown=BRACKETS)
    if _share(sample, r"^\{.*\}$") > 1 - TOLERATED:
        return ListLooks(problem=OBJECTS)
    suffix = names.suffix_of(column.name)
    if suffix in ("token_seq", "float_seq"):
        return _looks(texts, " ", shown=" ")
    is_number = (
        _share(sample, r"^[+-]?[0-9]+(,[0-9]+)*(\.[0-9]+)?$") > 1 - TOLERATED
        and _share(sample, ",") > 0
    )
    if is_number and _share(sample, ",.*,") < _SEPARATED_SHARE and not names.is_list(column.name):
        return ListLooks(problem=DECIMAL_COMMA)
    for separator in "|;, ":
        pattern = (
            rf"[^{re.escape(separator)}\s]{re.escape(separator)}\s*[^{re.escape(separator)}\s]"
        )
        if _share(sample, pattern) < _SEPARATED_SHARE:
            continue
        if separator == "|" or _is_list(column.name, sample, separator):
            return _looks(texts, separator, shown=separator)
        if not (names.is_prose(column.name) or (separator == " " and names.is_id(column.name))):
            return ListLooks(
                remark=f"; some have {separator!r} inside: if they are lists, name it under lists "
                "with "
                f"{{separator: {separator!r}}}"
            )
    return ListLooks()


def _is_list(name: str, texts: pa.Array, separator: str) -> bool:
    if names.is_prose(name):
        return False
    split = pc.split_pattern(texts, separator)
    elements = pc.utf8_trim_whitespace(split.flatten())
    elements = elements.filter(pc.not_equal(elements, ""))
    num_distinct = len(pc.unique(elements))
    if pc.max(pc.utf8_length(elements)).as_py() > _MAX_LETTERS:
        return False
    if separator != " " and pc.any(pc.match_substring_regex(elements, r"\s\S+\s")).as_py():
        return False  # a text whose elements have three or more words is a sentence
    if names.is_list(name):
        return True
    return len(texts) >= 20 and len(elements) / max(num_distinct, 1) >= _MIN_REPEATS


def _share(texts: pa.Array, pattern: str) -> float:
    found = pc.sum(pc.match_substring_regex(texts, pattern)).as_py() or 0
    return float(found) / max(len(texts), 1)


def _looks(texts: pa.Array, separator: str, *, shown: str) -> ListLooks:
    lists = ListRule(STRINGS, separator).parse(texts).values
    elements = pc.unique(lists.flatten().drop_null())
    element = TEXT
    for kind, rule in ((INTEGER, CATEGORIES), (FLOAT, NUMBERS)):
        if len(elements) and rule.parse(elements).values.null_count <= TOLERATED * len(elements):
            element = kind if kind == INTEGER or _share(elements, r"[.eE]") > TOLERATED else TEXT
            break
    longest = pc.max(pc.list_value_length(lists)).as_py() or 1
    return ListLooks(separator=shown, element=element, num_elements=len(elements), longest=longest)
