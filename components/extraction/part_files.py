"""Row streams to Parquet files of bounded size, and the cut of such files into older and newest rows.

File order is row order. Files are written into folders that are published as a whole by the caller.
"""

from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from components.extraction.raw_schema import BATCH_ROWS

FILE_ROWS = 4 * BATCH_ROWS
"""262,144 rows: about 40 MB, so that later steps can stream and share files out."""
_DICTIONARY_BYTES = 128 << 10
"""Of a column in a row group: 16,384 categories. A column of more distinct values is written plainly from there on, at
a sixth less of processor time and in as many bytes; pyarrow's 1 MiB is never reached by a row group's 65,536 rows."""


class PartFile(NamedTuple):
    """One file written."""

    path: Path
    num_rows: int


class PartWriter:
    """Writes raw rows as `<prefix>-00000.parquet` ... into `folder`, in full row groups but for the last.

    The folder is created where it is absent; `file_rows`, a multiple of `BATCH_ROWS`, keeps row groups full.
    """

    def __init__(
        self, folder: Path, *, prefix: str = "part", first_number: int = 0, file_rows: int = FILE_ROWS
    ) -> None:
        self.parts: list[PartFile] = []
        self._folder, self._prefix, self._number, self._file_rows = folder, prefix, first_number, file_rows
        self._pending: list[Any] = []
        self._num_pending = 0
        self._writer: Any = None
        self._num_written = 0

    def __enter__(self) -> "PartWriter":
        self._folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None and self._num_pending:
            self._write_group(self._num_pending)
        self._finish_file()

    def write(self, table: Any) -> None:
        """Adds the rows of a table or record batch in the raw schema."""
        self._pending.extend(table.to_batches() if isinstance(table, pa.Table) else [table])
        self._num_pending += table.num_rows
        while self._num_pending >= (size := min(BATCH_ROWS, self._file_rows - self._num_written)):
            self._write_group(size)

    def _write_group(self, num_rows: int) -> None:
        pending = pa.Table.from_batches(self._pending)
        if self._writer is None:
            path = self._folder / f"{self._prefix}-{self._number:05d}.parquet"
            self._writer = pq.ParquetWriter(path, pending.schema, dictionary_pagesize_limit=_DICTIONARY_BYTES)
            self.parts.append(PartFile(path, 0))
            self._number += 1
        self._writer.write_table(pending.slice(0, num_rows).combine_chunks(), row_group_size=num_rows)
        self._pending = pending.slice(num_rows).to_batches()
        self._num_pending -= num_rows
        self._num_written += num_rows
        self.parts[-1] = PartFile(self.parts[-1].path, self._num_written)
        if self._num_written == self._file_rows:
            self._finish_file()

    def _finish_file(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer, self._num_written = None, 0


def cut_newest(parts: list[PartFile], num_newest: int, *, older: Path, newest: Path) -> None:
    """Moves the rows of `parts` into the folders `older` and `newest`; the last `num_newest` rows are the newest.

    Files that lie on one side are renamed; the one that the cut goes through is rewritten as two.
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
        for batch in pq.ParquetFile(part.path).iter_batches(batch_size=BATCH_ROWS):
            here = min(max(num_older - row, 0), batch.num_rows)
            first.write(batch.slice(0, here))
            second.write(batch.slice(here))
            row += batch.num_rows
    part.path.unlink()
