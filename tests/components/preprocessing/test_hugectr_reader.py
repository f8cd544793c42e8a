"""Reads the written folder by HugeCTR's rules alone, and tests that both readers agree.

The test's reader refuses what HugeCTR misreads. The test's reader uses neither the step's own
check (`encode.verify_file`) nor the contract's column names. HugeCTR reads columns by position,
never by name.
"""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evergreen.storage.uris import local_path
from testing.recommenders import SHOP

SLOTS = SHOP.features.positions.slots
LABEL_DIM, DENSE_DIM, NUM_KEYS = 1, 2, len(SLOTS)
PARTITION_ROWS = 300


class Refused(Exception):
    """Raised if HugeCTR would fail on the file, or read wrong numbers."""


class Reader:
    """Reader of a file list, with the rules of `Solver` and `DataReaderParams(source=[...])`."""

    def __init__(self, source: Path, slot_sizes: list[int]) -> None:
        self.slot_sizes = slot_sizes
        count, *self.paths = source.read_text().split("\n")[:-1]
        if not count.isdigit() or int(count) != len(self.paths) or not self.paths:
            raise Refused(f"the file list states {count} files and lists {len(self.paths)}")
        if not self.paths[0].endswith(".parquet"):
            raise Refused(f"HugeCTR would read {self.paths[0]} as another format")
        if not all(os.path.isabs(path) and os.path.isfile(path) for path in self.paths):
            raise Refused("a listed path must be absolute and name a file")
        folder = Path(self.paths[0]).parent
        self.metadata = json.loads((folder / "_metadata.json").read_text())
        self.rows = {
            os.path.basename(s["file_name"]): s["num_rows"] for s in self.metadata["file_stats"]
        }
        self.order = {
            kind: sorted(c["index"] for c in self.metadata[kind])
            for kind in ("labels", "conts", "cats")
        }
        if [len(self.order[kind]) for kind in ("labels", "conts", "cats")] != [
            LABEL_DIM,
            DENSE_DIM,
            NUM_KEYS,
        ]:
            raise Refused(f"columns are {self.order}")
        if sorted(sum(self.order.values(), [])) != list(range(LABEL_DIM + DENSE_DIM + NUM_KEYS)):
            raise Refused(f"positions overlap or lack columns: {self.order}")

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Return labels with dense values, and keys to which the offset of their table is added."""
        tables = [self._table(path) for path in self.paths]
        values = np.concatenate(
            [self._stacked(t, self.order["labels"] + self.order["conts"]) for t in tables]
        )
        keys = np.concatenate([self._stacked(t, self.order["cats"]) for t in tables])
        ends = np.cumsum(self.slot_sizes)
        first, last = (each[list(SLOTS)] for each in (ends - self.slot_sizes, ends))
        fused = keys + first
        if (fused < first).any() or (fused >= last).any():
            raise Refused("a key lands in another table")
        return values, fused

    def _table(self, path: str) -> pa.Table:
        file, name = pq.ParquetFile(path), os.path.basename(path)
        if self.rows.get(name) != file.metadata.num_rows:
            raise Refused(
                f"{name} has {file.metadata.num_rows} rows, and {self.rows.get(name)} in "
                "_metadata.json"
            )
        for position in range(file.metadata.num_columns):
            column = file.schema.column(position)
            wanted = "INT64" if position in self.order["cats"] else "FLOAT"
            if column.physical_type != wanted or column.max_repetition_level:
                raise Refused(
                    f"column {position} of {name} is {column.physical_type}, expected {wanted}"
                )
        groups = [file.metadata.row_group(g).num_rows for g in range(file.metadata.num_row_groups)]
        if not groups or min(groups) == 0 or max(groups) > PARTITION_ROWS:
            raise Refused(f"row groups of {name} have {groups} rows")
        return file.read()

    @staticmethod
    def _stacked(table: pa.Table, positions: list[int]) -> np.ndarray:
        if nulls := sum(table.column(p).null_count for p in positions):
            raise Refused(f"{nulls} nulls, whose values are undefined")
        return np.stack([table.column(p).to_numpy() for p in positions], axis=1)


@pytest.fixture
def written(write_raw, run_step, raw_table):
    """Encoded rows that the step wrote, and the raw rows that it read."""
    rows = raw_table(1000, seed=1), raw_table(400, seed=2)
    path = write_raw(*rows, row_group_size=100)
    return run_step(path, partition_rows=PARTITION_ROWS, processes=2), rows


def source(encoded_set, part="train"):
    return local_path(getattr(encoded_set, f"{part}_uri")) / "_file_list.txt"


def test_comparison_reads_output_of_step_and_finds_rows_in_order(written, reading):
    training_set, rows = written
    workflow = reading.workflow(training_set)
    offsets = np.cumsum([0, *training_set.slot_sizes[:-1]])[list(SLOTS)]
    for part, table in zip(("train", "holdout"), rows):
        values, keys = Reader(source(training_set, part), training_set.slot_sizes).read()
        raw = reading.raw([table])
        np.testing.assert_array_equal(values[:, 0], raw.label)
        np.testing.assert_array_equal(values[:, 1:], workflow.encode_dense(raw.dense))
        np.testing.assert_array_equal(keys, workflow.encode_categorical(raw.categorical) + offsets)
    assert len(Reader(source(training_set), training_set.slot_sizes).paths) == 4
