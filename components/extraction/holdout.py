"""The split of a window's rows into training rows and the holdout.

The holdout consists of the newest rows. No row with a time or a request of the holdout was used to
train the candidate, its parent or the champion. On its own training rows, a model looks better than
it is. A model also looks better on other rows of the same requests, because the rows of a request
are alike. The split is therefore a point in time after the newest training row of the parent and
the champion. A row after the split is dropped if its request has rows before the split. The dropped
row is not lost, because the next run begins after the newest training row of this run. If all other
rows of a request are before the window, this run cannot detect the request. Late rows
(`components.extraction.seen_files`) precede the other rows in training and are never held out.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from components.extraction.copying import LATE, WINDOW, Copied
from evergreen.contracts.raw_rows import EVENT_TIME, REQUEST_ID
from evergreen.contracts.row_hash import request_hashes
from evergreen.rows.archived_rows import parquet_file
from evergreen.rows.raw_schema import BATCH_ROWS, PartFile, PartWriter
from evergreen.rows.times import DAY_MICROS, TimeSpan
from evergreen.runtime.errors import ContractError
from evergreen.runtime.workers import Workers

TRAIN, HOLDOUT = "train", "holdout"


class RowSplit(NamedTuple):
    """Numbers of rows on both sides of the split."""

    num_train: int
    """Training rows, including late rows."""
    num_newer: int
    """Rows after the split."""
    newer_days: Counter[int]
    """Number of rows after the split, for each day. Days are numbered since 1970."""
    last_trained: int
    """Time of the newest row before the split, microseconds since the epoch."""


def split_rows(
    copied: Copied, *, num_trained: int, holdout_fraction: float, window: TimeSpan, folder: Path
) -> RowSplit:
    """Move the copied rows to `folder`/train and `folder`/holdout.

    Rows with exactly the time of the split count as newer rows. If no row is older, these rows
    become training rows.

    Args:
        copied: Rows in `folder`.
        num_trained: The first `num_trained` rows of the window were used to train the baselines.
            These rows are not held out.
        holdout_fraction: Share of the window's rows that is held out, in (0, 1).
        window: Window of the rows, for messages.
        folder: Existing folder.

    Raises:
        ContractError: all rows have the same time.
    """
    parts, num_rows = copied.window.parts, copied.window.num_rows
    num_wanted = min(max(1, round(num_rows * holdout_fraction)), num_rows - 1)
    position = max(num_rows - num_wanted, num_trained)
    time = _time_at(parts, position)
    num_older = rows_until(parts, time - 1) or rows_until(parts, time)
    if num_older == num_rows:
        raise ContractError(
            f"all {num_rows} rows of window {window} have the same time, expected older and "
            "newer rows. Set data.event_time to the column with the times, and ingest the "
            "rows again into an empty lake. Without data.event_time, `evergreen data ingest` "
            "spreads the rows over days"
        )
    last_trained = _time_at(parts, num_older - 1)
    split_newest(parts, num_rows - num_older, older=folder / TRAIN, newest=folder / HOLDOUT)
    # The names of late files sort before the names of the other files.
    for part in copied.late.parts:
        part.path.rename(folder / TRAIN / part.path.name)
    for temporary in (folder / WINDOW, folder / LATE):
        for torn in temporary.glob(".*"):  # killed workers leave these files
            torn.unlink()
        if temporary.exists():
            temporary.rmdir()
    days: Counter[int] = Counter()
    for path in (folder / HOLDOUT).iterdir():
        days.update((_event_times(path) // DAY_MICROS).tolist())
    num_newer = num_rows - num_older
    return RowSplit(copied.late.num_rows + num_older, num_newer, days, last_trained)


def rows_until(parts: Sequence[PartFile], time: int) -> int:
    """Return the number of rows at or before `time` in files that are sorted by time."""
    return sum(int(np.searchsorted(_event_times(part.path), time, side="right")) for part in parts)


def _time_at(parts: Sequence[PartFile], position: int) -> int:
    for part in parts:
        if position < part.num_rows:
            return int(_event_times(part.path)[position])
        position -= part.num_rows
    raise AssertionError("the position belongs to a row")


def _event_times(path: Path) -> NDArray[np.int64]:
    """Return the event times of a file's rows, microseconds since the epoch, [n]."""
    times: NDArray[np.int64] = (
        parquet_file(path).read([EVENT_TIME]).column(0).cast(pa.int64()).to_numpy()
    )
    return times


def split_newest(parts: list[PartFile], num_newest: int, *, older: Path, newest: Path) -> None:
    """Divide the rows of `parts` between the folders `older` and `newest`.

    The last `num_newest` rows are moved to `newest`. A file that has rows for both folders is split
    into two new files. All other files are only renamed.
    """
    num_older = sum(part.num_rows for part in parts) - num_newest
    assert num_older >= 0
    older.mkdir()
    newest.mkdir()
    number, begin = {older: 0, newest: 0}, 0
    for part in parts:
        here = min(max(num_older - begin, 0), part.num_rows)
        begin += part.num_rows
        if 0 < here < part.num_rows:
            _rewrite(part, here, older=older, newest=newest, number=number[older])
            number[newest] = 1
            continue
        folder = older if here else newest
        part.path.rename(folder / f"part-{number[folder]:05d}.parquet")
        number[folder] += 1


def _rewrite(part: PartFile, num_older: int, *, older: Path, newest: Path, number: int) -> None:
    with PartWriter(older, first_number=number) as first, PartWriter(newest) as second:
        row = 0
        for batch in parquet_file(part.path).iter_batches(batch_size=BATCH_ROWS):
            here = min(max(num_older - row, 0), batch.num_rows)
            first.write(batch.slice(0, here))
            second.write(batch.slice(here))
            row += batch.num_rows
    part.path.unlink()


def remove_straddling(
    folder: Path, split: RowSplit, *, trained: Sequence[Path], window: TimeSpan, workers: Workers
) -> int:
    """Remove from `folder`/holdout the rows of requests that also have training rows.

    Rows of these requests would leak training data into the holdout.

    The function needs 4 bytes of memory for each request of the holdout. Each worker needs memory
    for the request ids of one file.

    Args:
        folder: Folder of the split rows.
        split: Numbers of rows on both sides of the split.
        trained: Folders of training rows.
        window: Window of the rows, for messages.
        workers: Workers that read the files.

    Returns:
        The number of removed rows.

    Raises:
        ContractError: no holdout row would remain.
    """
    holdout = folder / HOLDOUT
    own = np.unique(
        np.concatenate(
            [request_hashes(_request_ids(path)) for path in sorted(holdout.glob("*.parquet"))]
        )
    )
    files = [path for each in trained for path in sorted(each.glob("*.parquet"))]
    found = workers.run_all(partial(_ids_among, own), files)
    shared, num_removed = pa.array(sorted(set().union(*found)), pa.string()), 0
    for path in sorted(holdout.glob("*.parquet")) if len(shared) else ():
        if pc.any(pc.is_in(_request_ids(path), value_set=shared)).as_py():
            num_removed += _remove_requests(path, shared)
    if num_removed == split.num_newer:
        raise ContractError(
            f"window {window} has {num_removed} holdout rows, and all of their requests also "
            "have older rows, expected at least one request without older rows. The cause may be a "
            "data.request_id that names a session, a user or a day. In this case, remove "
            "data.request_id from the recommender's file and accept the file. Then ingest the rows "
            "again into an empty lake"
        )
    return num_removed


def _remove_requests(path: Path, requests: Any) -> int:
    """Remove the rows of these requests from a file, and return how many rows were removed."""
    complete, num_removed = path.rename(path.with_suffix(".whole")), 0
    with PartWriter(path.parent, prefix=path.stem) as writer:
        for batch in parquet_file(complete).iter_batches():
            kept = batch.filter(pc.invert(pc.is_in(batch.column(REQUEST_ID), value_set=requests)))
            num_removed += batch.num_rows - kept.num_rows
            writer.write(kept)
    for part in writer.parts:  # there is at most one file, because it has fewer rows than before
        part.path.rename(path)
    complete.unlink()
    return num_removed


def _request_ids(path: Path) -> Any:
    """Return the distinct request ids of a file."""
    return parquet_file(path).read([REQUEST_ID]).column(0).unique()


def _ids_among(hashes: NDArray[np.uint32], path: Path) -> list[str]:
    """Return those request ids of a file whose hash is in `hashes`. The hashes are ascending.

    Different ids may have the same hash.
    """
    ids = _request_ids(path)
    mine = request_hashes(ids)
    positions = np.minimum(np.searchsorted(hashes, mine), len(hashes) - 1)
    found: list[str] = ids.filter(pa.array(hashes[positions] == mine)).to_pylist()
    return found
