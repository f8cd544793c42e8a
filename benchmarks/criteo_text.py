"""Generate files like Criteo 1TB: gzipped TSV without header.

Integers are log-normal and rounded down, with the medians and missing shares of real rows.
Categories are 8 hex digits. The ranks of the categories are log-uniform (Zipf's exponent 1), so
that a few values occur in most rows. The same seed gives the same file.
"""

import gzip
import io
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv as pv
from numpy.typing import NDArray

from evergreen.contracts.criteo import CATEGORICAL, DENSE
from evergreen.contracts.raw_rows import LABEL

CLICK_RATE = 0.032
_BLOCK_ROWS = 100_000
_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)


class Integers(NamedTuple):
    """Distribution of one integer column."""

    missing: float
    median: float
    sigma: float
    """Standard deviation of the logarithm."""


INTEGERS = tuple(
    Integers(*each)
    for each in (
        (0.436, 1, 1.5),
        (0, 4, 2.5),
        (0.227, 6, 2.0),
        (0.247, 4, 1.2),
        (0.037, 2671, 2.2),
        (0.235, 35, 1.8),
        (0.044, 3, 1.8),
        (0.001, 8, 0.9),
        (0.044, 42, 1.5),
        (0.436, 0.5, 0.9),
        (0.044, 1, 1.5),
        (0.765, 0.5, 1.4),
        (0.247, 4, 1.3),
    )
)
CATEGORIES = (
    (0, 10_000_000),
    (0, 40_000),
    (0.034, 2_000_000),
    (0.034, 500_000),
    (0, 300),
    (0.12, 24),
    (0, 12_000),
    (0, 630),
    (0, 3),
    (0, 10_000_000),
    (0, 5600),
    (0.034, 1_500_000),
    (0, 3200),
    (0, 27),
    (0, 15_000),
    (0.034, 1_000_000),
    (0, 10),
    (0, 5600),
    (0.46, 2100),
    (0.46, 10_000_000),
    (0.034, 10_000_000),
    (0.77, 10_000_000),
    (0, 15),
    (0.034, 140_000),
    (0.46, 105),
    (0.46, 90_000),
)
"""Share of missing values, and number of distinct values, for each category column. As in Criteo
1TB, five columns have ten million values."""


def write_tsv_gz(path: Path, num_rows: int, *, seed: int = 0) -> None:
    """Write `num_rows` rows to `path`."""
    random = np.random.default_rng(seed)
    options = pv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    with gzip.open(path, "wb", compresslevel=6) as file:
        for first in range(0, num_rows, _BLOCK_ROWS):
            text = io.BytesIO()
            pv.write_csv(
                _random_text_table(random, min(_BLOCK_ROWS, num_rows - first)), text, options
            )
            file.write(text.getbuffer())


def _random_text_table(random: np.random.Generator, n: int) -> Any:
    columns = {LABEL: pa.array((random.random(n) < CLICK_RATE).astype(np.int32))}
    for name, (missing, median, sigma) in zip(DENSE, INTEGERS):
        values = np.floor(median * np.exp(sigma * random.normal(size=n))).astype(np.int64)
        # Real rows have -1 and -2 in this column.
        values -= 2 * (name == "I2")
        columns[name] = pa.array(values, mask=random.random(n) < missing)
    for number, (name, (missing, size)) in enumerate(zip(CATEGORICAL, CATEGORIES), start=1):
        ranks = np.minimum(size ** random.random(n), size).astype(np.uint64) - np.uint64(1)
        hashes = (
            (ranks * np.uint64(64) + np.uint64(number))
            * np.uint64(2_654_435_761)
            % np.uint64(2**32)
        )
        columns[name] = pa.array(
            hex_texts(hashes).astype(object), pa.string(), mask=random.random(n) < missing
        )
    return pa.table(columns)


def hex_texts(hashes: NDArray[np.uint64]) -> NDArray[np.str_]:
    """Return each value below 2**32 as 8 hex digits.

    >>> hex_texts(np.array([255, 2**32 - 1], np.uint64)).tolist()
    ['000000ff', 'ffffffff']
    """
    digits = (hashes[:, None] >> np.arange(28, -1, -4, dtype=np.uint64)) & np.uint64(15)
    texts: NDArray[np.str_] = (
        np.ascontiguousarray(_DIGITS[digits.astype(np.intp)]).view("S8").ravel().astype("U8")
    )
    return texts
