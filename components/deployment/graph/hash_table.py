"""A hash table held in three arrays, which a graph of standard operators can look up in: for large vocabularies.

Cuckoo hashing with `CHOICES` cells per key (Pagh & Rodler, ESA 2001; Fotakis et al., STACS 2003): choice d of a key is
cell `starts[d] + key mod primes[d]`, each choice in a range of its own. So a lookup is always `CHOICES` reads, however
large the table, and the arrays are constants that can lie in `model.data`, where ONNX Runtime maps them. The nodes that
look up are `graph.encoding`'s.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.runtime.errors import ContractError

CHOICES = 3
LOAD = 0.8
"""Share of cells with a key. With three choices tables can be built up to 0.92; below, the building is quick."""
EMPTY = -1
"""In `keys`, a cell without a key; keys are not negative."""
MAX_KEYS = 2**30
_MAX_ROUNDS = 1000


class HashTable(NamedTuple):
    """Keys and their values, where a lookup finds them. Cell 0 is empty and no key's: the place of what is unknown."""

    keys: NDArray[np.int64]
    """[cells], `EMPTY` where there is none."""
    values: NDArray[np.int32]
    """[cells], 0 where there is no key."""
    primes: tuple[int, ...]
    """Per choice, the number of its cells."""
    starts: tuple[int, ...]
    """Per choice, its first cell."""


def build_table(keys: NDArray[np.int64], values: NDArray[np.int32]) -> HashTable:
    """The table of distinct `keys` >= 0 and their `values`, both [n]; the same arguments give the same table.

    Raises:
        ContractError: there are more than `MAX_KEYS`.
    """
    if len(keys) > MAX_KEYS:
        raise ContractError(f"vocabularies have {len(keys)} entries, expected at most {MAX_KEYS} in one graph")
    cells = int(len(keys) / LOAD)
    while True:
        primes = _primes_from(max(3, cells // CHOICES), CHOICES)
        starts = np.cumsum([1, *primes[:-1]])
        owners = _place(keys, np.array(primes), starts)
        if owners is not None:
            break
        cells += cells // 8 + CHOICES  # Keys with much structure may need more room.
    taken = owners >= 0
    cell_keys, cell_values = np.full(len(owners), EMPTY, np.int64), np.zeros(len(owners), np.int32)
    cell_keys[taken], cell_values[taken] = keys[owners[taken]], values[owners[taken]]
    return HashTable(cell_keys, cell_values, primes, tuple(starts.tolist()))


def _place(keys: NDArray[np.int64], primes: NDArray[np.int64], starts: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Per cell, the position of the key in it or -1; None where some key found no cell.

    In rounds: every key without a cell takes its present choice, of several that want one cell the last gets it, and
    whoever lost or was put out tries its next choice in the next round.
    """
    owners = np.full(1 + int(primes.sum()), -1, np.int64)
    choices = np.zeros(len(keys), np.int8)
    waiting = np.arange(len(keys))
    for _ in range(_MAX_ROUNDS):
        choice = choices[waiting]
        cells = starts[choice] + keys[waiting] % primes[choice]
        before = owners[cells]
        owners[cells] = waiting
        lost, put_out = waiting[owners[cells] != waiting], np.unique(before[before >= 0])
        waiting = np.concatenate([lost, put_out])
        if not len(waiting):
            return owners
        choices[waiting] = (choices[waiting] + 1) % len(primes)
    return None


def _primes_from(least: int, count: int) -> tuple[int, ...]:
    """The first `count` primes that are at least `least`, which is at least 3.

    >>> _primes_from(90, 3)
    (97, 101, 103)
    """
    primes: list[int] = []
    candidate = least | 1
    while len(primes) < count:
        divisors = np.arange(3, int(candidate**0.5) + 1, 2)
        if (candidate % divisors).all():
            primes.append(candidate)
        candidate += 2
    return tuple(primes)
