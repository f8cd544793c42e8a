"""Rows of a file or folder of clicks, whatever its form: Parquet (`parquet_rows`) or Criteo's text (`text_rows`).

Extraction reads the same forms into the lake, by the same rules of `contracts.criteo`; unlike it, which sets malformed
rows aside, scoring stops at one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from components.contracts.criteo import CATEGORICAL, MISSING_CATEGORY
from components.runtime.errors import ContractError
from inference_client.parquet_rows import columns_of, read_parquet_rows
from inference_client.scorer import FeatureRows
from inference_client.text_rows import read_text_rows

Batch = tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int32]]

_BATCH_ROWS = 4096
_TEXT_NAME = re.compile(r"(day_\d+(\.gz)?|.*\.(tsv|txt|csv)(\.gz)?)$", re.IGNORECASE)


def row_files(path: Path) -> list[Path]:
    """The files that `path` names: itself, a folder's Parquet files (at any depth), or else its text files.

    Raises:
        ContractError: there are none, or a Parquet file lacks a feature.
    """
    files = [path]
    if path.is_dir():
        files = sorted(path.rglob("*.parquet")) or sorted(
            (each for each in path.iterdir() if each.is_file() and _TEXT_NAME.match(each.name)), key=_natural
        )
    if not files or not files[0].exists():
        raise ContractError(f"data {path} does not exist or holds no Parquet, TSV or CSV file")
    for each in files:
        if _is_parquet(each):
            columns_of(each, labelled=False)
    return files


def read_rows(files: Sequence[Path], *, labelled: bool = True, batch_rows: int = _BATCH_ROWS) -> Iterator[Batch]:
    """Dense [n, 13], categorical [n, 26] and labels [n] (zeros unless `labelled`), batch by batch, in order.

    Raises:
        ContractError: a file is of no known form, or a value is none of its column's; names the file, and the line
            or the column.
    """
    for path in files:
        read = read_parquet_rows if _is_parquet(path) else read_text_rows
        yield from read(path, labelled=labelled, batch_rows=batch_rows)


def first_rows(path: Path, num_rows: int) -> FeatureRows:
    """The first rows that `path` holds, at most `num_rows`.

    Raises:
        ContractError: it holds none, or as `read_rows`.
    """
    dense, categorical, found = [], [], 0
    for batch in read_rows(row_files(path), labelled=False):
        dense.append(batch[0])
        categorical.append(batch[1])
        found += len(batch[0])
        if found >= num_rows:
            break
    if not found:
        raise ContractError(f"data {path} holds no rows, expected at least 1")
    return FeatureRows(dense=np.concatenate(dense)[:num_rows], categorical=np.concatenate(categorical)[:num_rows])


def distinct_categories(files: Sequence[Path], columns: Sequence[str]) -> dict[str, NDArray[np.int64]]:
    """The different values of some category columns, rising; missing ones are none."""
    places = [CATEGORICAL.index(name) for name in columns]
    found: list[NDArray[np.int64]] = [np.empty(0, np.int64) for _ in places]
    for _, categorical, _ in read_rows(files, labelled=False, batch_rows=1 << 16):
        found = [np.union1d(known, categorical[:, place]) for known, place in zip(found, places)]
    return {name: values[values != MISSING_CATEGORY] for name, values in zip(columns, found)}


def _is_parquet(path: Path) -> bool:
    if path.suffix.lower() == ".parquet":
        return True
    with open(path, "rb") as file:
        return file.read(4) == b"PAR1"


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts `day_2` before `day_10`."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", path.name)]
