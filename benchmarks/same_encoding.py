"""Compare two folders of encoded rows. A stock NVTabular script wrote the second folder.

The stock script orders ids by frequency, and its order of equally frequent categories is not
stable. Therefore a column is accepted if a mapping converts all stock ids of the column to our ids.
The mapping must be one to one, and must map missing and out-of-vocabulary values to themselves. The
mapping may exchange only ids of equal frequency. Dense values may differ by 1e-6 times the larger
of 1 and the value, because the stock logarithm has only the precision of float32.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.stock_nvtabular import CATEGORICAL, DENSE, LABEL

FIRST_ID = 3
TOLERANCE = 1e-6


class Different(Exception):
    """The encodings differ. The message names the part or the column."""


def expect_same(stock: Path, ours: Path) -> int:
    """Check that both encodings are equal, and return the numbers of training and held-out rows.

    Raises:
        Different: the encodings differ.
    """
    parts = ("train", "holdout")
    theirs, own = ({part: _rows(folder / part) for part in parts} for folder in (stock, ours))
    for part in parts:
        if (theirs[part].num_rows, theirs[part].schema.names) != (
            own[part].num_rows,
            own[part].schema.names,
        ):
            raise Different(f"{part}: {theirs[part].num_rows} rows of {theirs[part].schema.names}")
        _expect_values(part, theirs[part], own[part])
    for name in CATEGORICAL:
        counts = np.bincount(_column(theirs["train"], name))
        of_theirs, of_own = (
            np.concatenate([_column(t[p], name) for p in parts]) for t in (theirs, own)
        )
        _expect_renaming(name, of_theirs, of_own, counts=counts)
    return sum(table.num_rows for table in own.values())


def _rows(folder: Path) -> Any:
    lines = (folder / "_file_list.txt").read_text().splitlines()[1:]
    return pa.concat_tables([pq.read_table(folder / Path(line).name) for line in lines])


def _column(table: Any, name: str) -> Any:
    return table[name].combine_chunks().to_numpy(zero_copy_only=False)


def _expect_values(part: str, theirs: Any, own: Any) -> None:
    for name in (LABEL, *DENSE):
        left, right = _column(theirs, name), _column(own, name)
        if left.dtype != right.dtype:
            raise Different(f"{part}, {name}: {left.dtype} and {right.dtype}")
        off = float((np.abs(left.astype(float) - right) / np.maximum(np.abs(right), 1.0)).max())
        if not off <= TOLERANCE:
            raise Different(f"{part}, {name}: values differ by {off}")


def _expect_renaming(name: str, theirs: Any, own: Any, *, counts: Any) -> None:
    pairs = np.unique(np.stack([theirs, own]), axis=1)
    if len(np.unique(pairs[0])) != pairs.shape[1] or len(np.unique(pairs[1])) != pairs.shape[1]:
        raise Different(f"{name}: the ids of the two encodings differ by more than a renaming")
    moved = pairs[:, pairs[0] != pairs[1]]
    if moved.size and moved.min() < FIRST_ID:
        raise Different(f"{name}: missing or out of vocabulary in only one of the encodings")
    if (wrong := counts[moved[0]] != counts[moved[1]]).any():
        raise Different(
            f"{name}: ids {moved[:, wrong][:, 0].tolist()} are of categories of another frequency"
        )
