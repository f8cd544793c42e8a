"""Digits to numbers, 8 at a time: arithmetic on words of 8 characters, all of an array's at once.

A word is 8 bytes of text as a little-endian 64-bit number, so its first character is the lowest byte. Only the first n
characters of each count; what stands behind them is another field's. Values and checks follow
`contracts.criteo.parse_category` and `parse_integer`; which field a word is of is left to `sound`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

WIDTH = 8
_EACH = 0x0101010101010101
"""Times a byte: the word of 8 of it."""


def words_at(content: bytes, starts: NDArray[np.int64]) -> Words:
    """The 8 characters from each start on; zero bytes behind the content's end.

    Args:
        content: What the starts are places in.
        starts: Of any shape, each 0 to `len(content)`.
    """
    aligned = np.zeros(len(content) // WIDTH + 2, np.uint64)
    aligned.view(np.uint8)[: len(content)] = np.frombuffer(content, np.uint8)
    # Each from the two aligned words that it lies across: NumPy takes unaligned ones in twice the time (measured).
    at = starts >> 3
    words: Words = aligned.take(at, mode="clip")
    at += 1
    behind: Words = aligned.take(at, mode="clip")
    bits = (starts & 7).view(np.uint64)
    bits <<= 3
    words >>= bits
    np.subtract(8 * WIDTH, bits, out=bits)
    behind <<= bits
    words |= behind
    return words


def hex_values(words: Words, lengths: NDArray[np.int64]) -> Words | None:
    """The values of the first `lengths` characters as hex digits, 0 for none; None if one is no digit.

    Args:
        words: Of any shape; overwritten.
        lengths: Of that shape, 0 to `WIDTH`.
    """
    digits = _right_aligned(words, lengths)
    # 0 to 9 are 0x00 to 0x09 now, a to f 0x51 to 0x56, A to F 0x71 to 0x76. A letter has 0x10 in its byte here:
    letter = digits >> 2
    letter &= 0x10 * _EACH
    # 0x20 is for letters alone.
    wrong = letter << 1
    np.invert(wrong, out=wrong)
    wrong &= digits
    wrong &= 0x20 * _EACH
    # 0x10 is in all letters and in nothing else, 0x80 in none.
    others = digits ^ letter
    digits &= 0x0F * _EACH
    digits += (letter >> 4) * 9
    # Beyond f, 0x10 is in the sum; and between 9 and a, a digit is above 9 or a letter below 10.
    others |= digits
    letter ^= digits + 6 * _EACH
    others |= letter
    others &= 0x90 * _EACH
    wrong |= others
    if wrong.any():
        return None
    return _joined(digits, base=16)


def decimal_values(words: Words, lengths: NDArray[np.int64]) -> tuple[Words, NDArray[np.bool_]]:
    """The values of the first `lengths` characters as decimal digits, 0 for none; and which have another character.

    Args:
        words: Of any shape; overwritten.
        lengths: Of that shape, 0 to `WIDTH`.
    """
    digits = _right_aligned(words, lengths)
    wrong = digits + 0x76 * _EACH
    wrong |= digits
    wrong &= 0x80 * _EACH
    return _joined(digits, base=10), wrong != 0


def _right_aligned(words: Words, lengths: NDArray[np.int64]) -> Words:
    """The first characters, less "0" each, behind zero bytes; in place."""
    words ^= 0x30 * _EACH
    bits_behind = lengths * -8
    bits_behind += 8 * WIDTH
    # NumPy shifts by the whole width, and by what a negative number looks like, to 0.
    words <<= bits_behind.view(np.uint64)
    return words


def _joined(digits: Words, *, base: int) -> Words:
    """8 digits, the first in the lowest byte, as one number; in place: pairs of them first, then fours, then all."""
    for factor, shift, mask in (
        (1 + (base << 8), 8, 0x00FF00FF00FF00FF),
        (1 + (base**2 << 16), 16, 0x0000FFFF0000FFFF),
        (1 + (base**4 << 32), 32, 0x00000000FFFFFFFF),
    ):
        digits *= factor
        digits >>= shift
        digits &= mask
    return digits
