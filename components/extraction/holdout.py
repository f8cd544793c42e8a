"""Which rows of a window judge: the newest, of times and requests from which no contestant learned.

Contestants are the candidate, which learns the rest of the window, its parent and the champion. A model that learned
some of the rows that judge looks better on them than it is, and so does one that learned other rows of their requests,
because the rows of a request are alike. So the cut lies between two times, after the newest row that a rival learned,
and a row after it whose request has rows before it judges nobody.

No row is lost by that: the next round begins after the newest row learned here, so it learns every row that judged,
and every row left out. What cannot be seen here is a request whose other rows all lie before the window.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from components.contracts.raw_rows import EVENT_TIME, REQUEST_ID
from components.extraction.part_files import PartFile, PartWriter


class Cut(NamedTuple):
    """Where the rows that are learned end."""

    num_older: int
    """Rows before the cut."""
    last_learned: int
    """Time of the newest of them, microseconds since the epoch."""


def event_times(path: Path) -> NDArray[np.int64]:
    """Event times of a file's rows, microseconds since the epoch, [n]."""
    times: NDArray[np.int64] = pq.ParquetFile(path).read([EVENT_TIME]).column(0).cast(pa.int64()).to_numpy()
    return times


def rows_until(parts: Sequence[PartFile], time: int) -> int:
    """How many rows of files in the order of time are at or before `time`."""
    return sum(int(np.searchsorted(event_times(part.path), time, side="right")) for part in parts)


def find_cut(parts: Sequence[PartFile], num_wanted: int, *, learned: int | None) -> Cut | None:
    """The cut that leaves about `num_wanted` rows to judge, all newer than `learned`; None where there is none.

    Rows of the cut's own time are all left to judge, so they may be more than `num_wanted`; they are all learned
    where no older row would be left to learn. `parts` are the window's rows in the order of time; `learned` is the
    newest row that a rival learned, microseconds since the epoch, None = there is no rival.
    """
    num_rows = sum(part.num_rows for part in parts)
    num_learned = 0 if learned is None else rows_until(parts, learned)
    place = max(num_rows - num_wanted, num_learned)
    if place >= num_rows:
        return None
    time = _time_at(parts, place)
    num_older = rows_until(parts, time - 1) or rows_until(parts, time)
    return Cut(num_older, _time_at(parts, num_older - 1)) if num_older < num_rows else None


def remove_straddling(holdout: Path, learned: Sequence[Path]) -> int:
    """Removes from `holdout` the rows of requests that have rows in the folders `learned`; returns how many.

    The request ids of `holdout` and of one file of the others are in memory at a time.
    """
    own = pa.concat_arrays(list(_request_ids(holdout))).unique()
    is_shared = np.zeros(len(own), bool)
    for folder in learned:
        for ids in _request_ids(folder):
            is_shared |= pc.is_in(own, value_set=ids).to_numpy(zero_copy_only=False)
    if not is_shared.any():
        return 0
    shared, num_removed = own.filter(pa.array(is_shared)), 0
    whole = holdout.rename(holdout.with_name(f"{holdout.name}-whole"))
    with PartWriter(holdout) as writer:
        for path in sorted(whole.iterdir()):
            for batch in pq.ParquetFile(path).iter_batches():
                kept = batch.filter(pc.invert(pc.is_in(batch.column(REQUEST_ID), value_set=shared)))
                num_removed += batch.num_rows - kept.num_rows
                writer.write(kept)
            path.unlink()
    whole.rmdir()
    return num_removed


def _time_at(parts: Sequence[PartFile], place: int) -> int:
    for part in parts:
        if place < part.num_rows:
            return int(event_times(part.path)[place])
        place -= part.num_rows
    raise AssertionError("the place is one of a row")


def _request_ids(folder: Path) -> Iterator[Any]:
    """The distinct request ids of each file of a folder that may be absent."""
    for path in sorted(folder.glob("*.parquet")):
        yield pq.ParquetFile(path).read([REQUEST_ID]).column(0).unique()
