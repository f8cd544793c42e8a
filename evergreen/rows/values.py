"""Parsing rules for the values of users' files, shared by text, JSON lines and Parquet.

Each kind of column has a rule. The rule converts an Arrow array of any type to the raw type. A
missing or malformed value becomes null. Malformed values are also marked. Texts are parsed once for
each distinct value. `contracts.values` defines missing texts and booleans, and `time_forms`
defines times.
"""

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from evergreen.config.features import category_of
from evergreen.contracts import values as meanings
from evergreen.contracts.records import MAX_ID_CHARACTERS
from evergreen.rows.archived_rows import is_list
from evergreen.rows.raw_schema import BYTES, list_positions, regrouped

_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?$"
_WHOLE = re.compile(r"([+-]?)([0-9]{1,20})(\.0*)?", re.ASCII)
_LONG_FLOAT = re.compile(r"[+-]?[0-9]{16,}\.[0-9]*", re.ASCII)


class Parsed(NamedTuple):
    """A column parsed by a rule."""

    values: Any
    """Arrow array of the raw type. A missing or malformed value is null."""
    is_missing: Any
    """Mask of missing values, as Arrow booleans."""
    is_wrong: Any
    """Mask of malformed values, as Arrow booleans."""


@dataclass(frozen=True, kw_only=True)
class ValueRule:
    """Parsing rule of one kind of column."""

    type: Any
    """Arrow type of the raw column."""
    expected: str
    """Description of a valid value, for messages."""
    of_text: Callable[[Any], Any]
    """Function that converts an array of texts to an array of `type`. The texts are distinct, and
    none of them means a missing value. A malformed text becomes null."""
    of_typed: Callable[[Any], Any]
    """Function that converts an array of numbers, booleans or times to an array of `type`. A
    malformed value becomes null."""
    is_required: bool = False
    """Whether a row with a missing value is malformed."""

    def parse(self, column: Any) -> Parsed:
        """Parse a column of any Arrow type."""
        column = plain(column)
        if pa.types.is_null(column.type):
            missing = pa.array(np.ones(len(column), bool))
            return Parsed(
                pa.nulls(len(column), self.type), missing, pa.array(np.zeros(len(column), bool))
            )
        if is_text(column.type):
            return self._texts(column)
        if pa.types.is_floating(column.type):
            column = pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)
        try:
            found = self.of_typed(column)
        except (pa.ArrowException, OverflowError):
            found = _one_by_one(column, self.of_typed, self.type)
        return self._parsed(found, column.is_null())

    def _texts(self, column: Any) -> Parsed:
        encoded = column.dictionary_encode()
        texts = encoded.dictionary
        is_missing = missing_texts(texts)
        found = self.of_text(pc.if_else(is_missing, pa.scalar(None, texts.type), texts))
        missing = pc.fill_null(is_missing.take(encoded.indices), True)
        return self._parsed(found.take(encoded.indices), missing)

    def _parsed(self, found: Any, is_missing: Any) -> Parsed:
        if found.type != self.type:
            found = found.cast(self.type)
        return Parsed(found, is_missing, pc.and_not(found.is_null(), is_missing))


_MISSING = pa.array(sorted(meanings.MISSING_TEXTS))


def missing_texts(texts: Any) -> Any:
    """Return a mask of the texts in an Arrow array that stand for a missing value."""
    return pc.is_in(pc.utf8_trim_whitespace(texts), value_set=_MISSING.cast(texts.type))


def plain(column: Any) -> Any:
    """Return a column without dictionaries and chunks. Bytes in UTF-8 are converted to texts."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if is_bytes(column.type):
        try:
            return column.cast(pa.string())
        except pa.ArrowInvalid:
            return pa.array([_decoded(value) for value in column.to_pylist()], pa.string())
    return column


def _decoded(value: bytes | None) -> str | None:
    # An invalid byte is replaced by the replacement character, which no rule accepts. Only the row
    # with the invalid byte is therefore malformed.
    return None if value is None else value.decode(errors="replace")


def _one_by_one(column: Any, convert: Callable[[Any], Any], wanted: Any) -> Any:
    """Convert each value separately. If a value cannot be converted, it becomes null."""
    found = []
    for i in range(len(column)):
        try:
            found.append(convert(column.slice(i, 1)).cast(wanted))
        except (pa.ArrowException, OverflowError):
            found.append(pa.nulls(1, wanted))
    return pa.concat_arrays(found)


def is_bytes(found: Any) -> bool:
    """Return whether an Arrow type is bytes. Some writers store texts as bytes."""
    return any(is_type(found) for is_type in BYTES)


def is_text(found: Any) -> bool:
    """Return whether an Arrow type is text."""
    return bool(pa.types.is_string(found) or pa.types.is_large_string(found))


# -- numbers


def _mixed(texts: Any, usual: Any, convert: Callable[[str], Any]) -> Any:
    """Fill each null value of `usual` with the converted text at the same position."""
    at = np.flatnonzero(pc.and_(usual.is_null(), texts.is_valid()).to_numpy(zero_copy_only=False))
    if not len(at):
        return usual
    mask = np.zeros(len(texts), bool)
    mask[at] = True
    others = pa.array([convert(text) for text in texts.take(pa.array(at)).to_pylist()], usual.type)
    return pc.replace_with_mask(usual, pa.array(mask), others)


def matching(texts: Any, pattern: str) -> Any:
    """Return the texts that match an RE2 pattern, and null for all other texts."""
    return pc.if_else(pc.match_substring_regex(texts, pattern), texts, pa.scalar(None, texts.type))


def _numbers_of_text(texts: Any) -> Any:
    numbers = matching(pc.utf8_trim_whitespace(texts), _NUMBER)
    return _finite(numbers.cast(pa.float64()).cast(pa.float32()))


def _numbers_of_typed(column: Any) -> Any:
    return _finite(column.cast(pa.float64(), safe=False).cast(pa.float32(), safe=False))


def _finite(numbers: Any) -> Any:
    return pc.if_else(pc.is_finite(numbers), numbers, pa.scalar(None, numbers.type))


NUMBERS = ValueRule(
    type=pa.float32(),
    expected="a finite number with a decimal point, or nothing",
    of_text=_numbers_of_text,
    of_typed=_numbers_of_typed,
)


def _weights(of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def weights(found: Any) -> Any:
        numbers = of(found)
        return pc.if_else(pc.greater_equal(numbers, 0), numbers, pa.scalar(None, numbers.type))

    return weights


WEIGHTS = ValueRule(
    type=pa.float32(),
    expected="a finite number of at least 0",
    of_text=_weights(_numbers_of_text),
    of_typed=_weights(_numbers_of_typed),
    is_required=True,
)


# -- labels and positions


_LABELS = {"0": 0, "1": 1, "false": 0, "true": 1}


def _labels_of_text(texts: Any) -> Any:
    return _mixed(texts, pa.nulls(len(texts), pa.int32()), _label_of_text)


def _label_of_text(text: str) -> int | None:
    return _LABELS.get(re.sub(r"^([01])\.0*$", r"\1", text.strip().lower()))


def _labels_of_typed(column: Any) -> Any:
    numbers = (
        column.cast(pa.float64())
        if not pa.types.is_boolean(column.type)
        else column.cast(pa.int32())
    )
    numbers = numbers.cast(pa.float64())
    is_label = pc.is_in(numbers, value_set=pa.array([0.0, 1.0]))
    return pc.if_else(is_label, numbers, pa.scalar(None, pa.float64())).cast(pa.int32())


LABELS = ValueRule(
    type=pa.int32(),
    expected="0, 1, true or false",
    of_text=_labels_of_text,
    of_typed=_labels_of_typed,
    is_required=True,
)


def _positions_of_text(texts: Any) -> Any:
    return _mixed(texts, pa.nulls(len(texts), pa.int32()), _position_of_text)


def _position_of_text(text: str) -> int | None:
    number = _whole_of_text(text)
    return None if number is None or not 0 <= number < 2**31 else number


def _positions_of_typed(column: Any) -> Any:
    return pc.if_else(pc.greater_equal(column, 0), column, pa.scalar(None, column.type)).cast(
        pa.int32()
    )


POSITIONS = ValueRule(
    type=pa.int32(),
    expected="a whole number of 0 or more",
    of_text=_positions_of_text,
    of_typed=_positions_of_typed,
    is_required=True,
)


# -- categories


def _whole_of_text(text: str) -> int | None:
    """Return the whole number that a text represents exactly, or None.

    For "007" the result is None, because "007" and "7" are different texts.
    """
    if not (found := _WHOLE.fullmatch(text.strip())):
        return None
    sign, digits, point = found.groups()
    number = int(sign + digits)
    is_exact = not point or abs(number) < meanings.EXACT_FLOATS
    is_plain = digits == "0" or not digits.startswith("0")
    return (
        number
        if is_exact and is_plain and meanings.MIN_WHOLE <= number < meanings.END_OF_WHOLE
        else None
    )


def _category_of_text(text: str) -> int | None:
    number = _whole_of_text(text)
    if number is None:
        word = text.strip().lower()
        return category_of(word) if word in ("true", "false") else None
    return number if number < 2**63 else category_of(str(number))


def _categories_of_text(texts: Any) -> Any:
    return _mixed(
        texts, matching(texts, "^(0|-?[1-9][0-9]{0,17})$").cast(pa.int64()), _category_of_text
    )


def _whole_numbers(column: Any) -> Any:
    """Convert numbers to whole numbers.

    A number with a fractional part becomes null. A float that is too large to be exact also becomes
    null.
    """
    if pa.types.is_floating(column.type):
        exact = meanings.EXACT_BELOW[str(column.type)]
        is_whole = pc.and_(pc.equal(column, pc.floor(column)), pc.less(pc.abs(column), exact))
        return pc.if_else(is_whole, column, pa.scalar(None, column.type)).cast(pa.int64())
    if pa.types.is_decimal(column.type):
        numbers = [
            None if number is None or number != int(number) else int(number)
            for number in column.to_pylist()
        ]
        least, end = meanings.MIN_WHOLE, meanings.END_OF_WHOLE
        kept = [
            None if number is None or not least <= number < end else number for number in numbers
        ]
        is_large = any(number is not None and number >= 2**63 for number in kept)
        return pa.array(kept, pa.uint64() if is_large else pa.int64())
    if not pa.types.is_integer(column.type):
        raise pa.ArrowTypeError(f"{column.type} holds no whole numbers")
    return column


def _categories_of_typed(column: Any) -> Any:
    if pa.types.is_boolean(column.type):
        return pc.if_else(column, category_of("true"), category_of("false")).cast(pa.int64())
    numbers = _whole_numbers(column)
    if not pa.types.is_uint64(numbers.type):
        return numbers.cast(pa.int64())
    return pa.array(
        [
            None if n is None else n if n < 2**63 else category_of(str(n))
            for n in numbers.to_pylist()
        ],
        pa.int64(),
    )


CATEGORIES = ValueRule(
    type=pa.int64(),
    expected="a whole number of 64 bits, exact and without leading zeros, or nothing (`type: "
    "string` takes any text)",
    of_text=_categories_of_text,
    of_typed=_categories_of_typed,
)


def _string_of_text(text: str) -> str | None:
    if (
        _LONG_FLOAT.fullmatch(text)
        and abs(float(text)) >= meanings.EXACT_FLOATS
        or "\ufffd" in text
    ):
        return None
    return meanings.text_of_value(text, is_string=True)


_UNUSUAL_WORD = "(?i)^\\s*(true|false)\\s*$|^[+-]?[0-9]{16,}\\.[0-9]*$|\ufffd"


def _strings_of_text(texts: Any) -> Any:
    usual = pc.if_else(
        pc.match_substring_regex(texts, _UNUSUAL_WORD), pa.scalar(None, texts.type), texts
    )
    return _mixed(texts, usual, _string_of_text)


def _strings_of_typed(column: Any) -> Any:
    if pa.types.is_boolean(column.type):
        true, false = (meanings.text_of_value(value, is_string=True) for value in (True, False))
        return pc.if_else(column, true, false)
    return _whole_numbers(column).cast(pa.string())


STRINGS = ValueRule(
    type=pa.string(),
    expected="a text in UTF-8, a whole number written exactly, or nothing",
    of_text=_strings_of_text,
    of_typed=_strings_of_typed,
)


def _ids_of_text(texts: Any) -> Any:
    is_id = pc.less_equal(pc.utf8_length(texts), MAX_ID_CHARACTERS)
    is_id = pc.and_not(is_id, pc.match_substring(texts, "\ufffd"))
    return pc.if_else(is_id, texts, pa.scalar(None, texts.type))


REQUEST_IDS = ValueRule(
    type=pa.string(),
    expected=f"a text of up to {MAX_ID_CHARACTERS} characters",
    of_text=_ids_of_text,
    of_typed=lambda column: _whole_numbers(column).cast(pa.string()),
)


# -- lists


@dataclass(frozen=True)
class ListRule:
    """Parsing rule of lists. If a list is stored as text, it has brackets or a separator."""

    element: ValueRule
    separator: str

    @property
    def type(self) -> Any:
        """See `ValueRule.type`."""
        return pa.list_(self.element.type)

    @property
    def expected(self) -> str:
        """See `ValueRule.expected`."""
        return (
            f"elements separated by {self.separator!r} or in JSON brackets, each "
            f"{self.element.expected}"
        )

    is_required = False

    def parse(self, column: Any) -> Parsed:
        """Parse a column.

        Missing elements are dropped. A malformed element makes its list malformed.
        """
        column = plain(column)
        if pa.types.is_null(column.type):
            column = column.cast(pa.string())
        if is_text(column.type):
            encoded = column.dictionary_encode()
            parsed = self._lists(
                pa.array([self._split(text) for text in encoded.dictionary.to_pylist()], _TEXTS)
            )
            taken = [each.take(encoded.indices) for each in parsed]
            return Parsed(taken[0], pc.fill_null(taken[1], True), pc.fill_null(taken[2], False))
        if pa.types.is_fixed_size_list(column.type):
            column = column.cast(pa.list_(column.type.value_type))
        if not is_list(column.type):
            wrong = column.is_valid()
            return Parsed(pa.nulls(len(column), self.type), column.is_null(), wrong)
        return self._lists(column)

    def _split(self, text: str) -> list[str | None]:
        stripped = text.strip()
        if stripped.startswith("["):
            try:
                return [_json_element(element) for element in json.loads(stripped)]
            except (ValueError, RecursionError):
                return _python_list(stripped)
        if meanings.is_missing_text(text):
            return []
        return [
            part.strip() if self.separator != " " else part
            for part in stripped.split(self.separator)
        ]

    def _lists(self, column: Any) -> Parsed:
        elements = self.element.parse(column.flatten())
        positions, is_wrong = list_positions(column), np.zeros(len(column), bool)
        is_wrong[positions[elements.is_wrong.to_numpy(zero_copy_only=False)]] = True
        lists = regrouped(
            elements.values, positions, num_lists=len(column), malformed=is_wrong
        ).cast(self.type)
        wrong = pa.array(is_wrong)
        return Parsed(lists, pc.and_not(lists.is_null(), wrong), wrong)


_TEXTS = pa.list_(pa.string())
_NO_LIST: list[str | None] = ["\ufffd"]
"""Result for a text that has brackets but is not a list. No rule accepts this replacement
character, so the row is malformed."""
_NUMPY = re.compile(r"\[\s*(?:[^\s\[\]',\"]+(?:\s+[^\s\[\]',\"]+)*)?\s*\]")


def _python_list(text: str) -> list[str | None]:
    """Return the elements of a list printed by Python, pandas or NumPy: `['a', 'b']`, `[1 2]`."""
    if _NUMPY.fullmatch(text) and "..." not in text:
        return list(text[1:-1].split())
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return _NO_LIST
    return [_json_element(element) for element in found] if isinstance(found, list) else _NO_LIST


def _json_element(element: object) -> str | None:
    if element is None or isinstance(element, str):
        return element
    if not isinstance(element, int | float):
        return "\ufffd"  # nested lists are not supported, and make the row malformed
    return json.dumps(element)
