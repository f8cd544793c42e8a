"""Simulated bit rot: a disk that silently returns bytes that were never written."""

import random
from collections import Counter
from pathlib import Path

from evergreen.runtime.errors import ContractError

QUIET, REFUSED, SAME = "read as something else", "refused", "read as it was"


def count_flips(path: Path, read, *, flips: int, seed: int = 0) -> Counter:
    """Flip single bits of the file, and count the results of `read()` by kind.

    After the test, the file has its original content.

    `read` must raise ContractError or return the same value as before.
    """
    content, right = path.read_bytes(), read()
    found = Counter({QUIET: 0, REFUSED: 0, SAME: 0})
    try:
        for bit in random.Random(seed).sample(
            range(8 * len(content)), min(flips, 8 * len(content))
        ):
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            try:
                found[SAME if read() == right else QUIET] += 1
            except ContractError:
                found[REFUSED] += 1
    finally:
        path.write_bytes(content)
    return found
