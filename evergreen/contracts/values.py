"""The meaning of a feature's value: whether the value is missing, and its text as a category.

Users' files, the lake and the inference client may spell the same value in different ways. For
example, a boolean is `True` in a CSV, a bit in Parquet and a bool in a service. All readers use
this module, so that a value has the same category in a file and in a request.
`features.category_of` converts the text to the category.
"""

import math
import re

from evergreen.config.features import BOOLEAN_TEXTS, lowered_boolean
from evergreen.runtime.errors import ContractError

MISSING_TEXTS = frozenset(
    {
        "",
        "NULL",
        "null",
        "None",
        "none",
        r"\N",
        "NA",
        "N/A",
        "n/a",
        "#N/A",
        "<NA>",
        "NaN",
        "nan",
        "NaT",
        "-",
        "?",
    }
)
"""Texts that mean "no value" in every feature column, even with spaces around them. The texts are
case-sensitive: "Na" and "NONE" are ordinary texts. If one of these texts is a real value of a
column, such as the country code NA, the data must contain another text for this value."""
EXACT_FLOATS = 2**53
"""Limit from which a 64-bit float no longer represents every whole number."""
EXACT_BELOW = {
    **dict.fromkeys(("float64", "double"), EXACT_FLOATS),
    **dict.fromkeys(("float32", "float"), 2**24),
    **dict.fromkeys(("float16", "halffloat"), 2**11),
}
"""Limit for each float type. Below the limit, the type represents every whole number exactly. The
keys are type names of NumPy and of Arrow."""
MIN_WHOLE, END_OF_WHOLE = -(2**63), 2**64
"""Range of whole numbers that can be categories. The numbers have 64 bits, signed or unsigned.
`END_OF_WHOLE` is exclusive."""
_A_CATEGORY = "a whole number of 64 bits, true or false, or None for missing"
_A_STRING = "a text, a whole number of 64 bits, true or false, or None for missing"
_WHOLE = re.compile(r"[+-]?[0-9]{1,20}(\.0*)?", re.ASCII)


class NoCategory(ContractError):
    """Error about a value that is not a category.

    `expected` is a text that describes valid values.
    """

    def __init__(self, value: object, expected: str) -> None:
        super().__init__(f"a category is {value!r}, expected {expected}")
        self.expected = expected


def is_missing_text(text: str) -> bool:
    r"""Return whether a text means that there is no value.

    >>> [is_missing_text(text) for text in (" NULL ", r"\N", "0", "NAN")]
    [True, True, False, False]
    """
    return text.strip() in MISSING_TEXTS


def is_missing(value: object) -> bool:
    """Return whether a value of any type means that there is no value.

    Missing values are None, NaN, pandas' NA and NaT, and the texts of `MISSING_TEXTS`.

    >>> [is_missing(value) for value in (None, float("nan"), "NULL", 0, "")]
    [True, True, True, False, True]
    """
    if isinstance(value, str):
        return is_missing_text(value)
    # The name of the type is compared, because pandas is not always installed.
    return (
        value is None
        or type(value).__name__ in _PANDAS_MISSING
        or (isinstance(value, float) and math.isnan(value))
    )


_PANDAS_MISSING = ("NAType", "NaTType")


def text_of_value(value: object, *, is_string: bool, exact_below: int = EXACT_FLOATS) -> str | None:
    """Return the text of one value of a categorical feature or list, or None if it is missing.

    A boolean is `true` or `false`, whether it is a bool or a text in any case. A whole number
    is written as Python prints it, whether it is an int or a float.

    Args:
        value: None, a bool, int, float or str.
        is_string: Whether the feature's type is `string`. If the feature has no string
            categories, a text must be a whole number or a boolean.
        exact_below: Exclusive upper limit of a float, which depends on its original type
            (`EXACT_BELOW`).

    Raises:
        NoCategory: The value has an unsupported type, is a whole number beyond 64 bits, or is a
            float that is too large to be exact.

    >>> [text_of_value(value, is_string=True) for value in (True, "TRUE", 7.0, "07", "NULL", None)]
    ['true', 'true', '7', '07', None, None]
    >>> text_of_value("07", is_string=False)
    '7'
    """
    if is_missing(value):
        return None
    if isinstance(value, bool):
        return BOOLEAN_TEXTS[value]
    if isinstance(value, str):
        return _canonical_text(value, is_string=is_string)
    expected = _A_STRING if is_string else _A_CATEGORY
    if isinstance(value, float):
        return str(_whole_number(value, expected, exact_below=exact_below))
    if isinstance(value, int) and MIN_WHOLE <= value < END_OF_WHOLE:
        return str(int(value))
    raise NoCategory(value, expected)


def _canonical_text(text: str, *, is_string: bool) -> str:
    word = lowered_boolean(text)
    if is_string or word in BOOLEAN_TEXTS:
        return word
    if not _WHOLE.fullmatch(text):
        raise NoCategory(text, _A_CATEGORY)
    digits, point, _ = text.partition(".")
    if point:  # Python prints floats with a decimal point
        return str(
            _whole_number(float(digits), _A_CATEGORY, exact_below=EXACT_FLOATS, written=text)
        )
    if not MIN_WHOLE <= int(digits) < END_OF_WHOLE:
        raise NoCategory(text, _A_CATEGORY)
    return str(int(digits))


def _whole_number(value: float, expected: str, *, exact_below: int, written: object = None) -> int:
    """Return a float as an int if it represents a whole number exactly.

    Raises:
        NoCategory: the float is not whole, or too large to be exact.
    """
    shown = value if written is None else written
    if not value.is_integer():
        raise NoCategory(shown, expected)
    if abs(value) >= exact_below:
        # At `exact_below` and above, adjacent whole numbers become the same float, so that two
        # users would get one category.
        raise NoCategory(shown, f"an int or a text: a float is exact below {exact_below} only")
    return int(value)
