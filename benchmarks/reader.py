"""The reader alone: from Parquet files to shuffled batches, without anybody who learns them.

Files were written a moment before and lie in the page cache, so this is decoding and not the disk.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.encoded_rows import SAMPLE_SLOT_SIZES, PlantedLogit, write_parquet
from benchmarks.speed import SpeedSpread
from components.training.rows import open_rows

_REPEATS = 5


def measure(num_rows: int, batch_size: int, scratch: Path) -> dict[str, Any]:
    """Rows per second of decoding, of assembling batches in shuffled order, and of both together (one epoch)."""
    folder = write_parquet(scratch / "rows", PlantedLogit(SAMPLE_SLOT_SIZES).draw(num_rows, seed=2)[0])
    decoding, batches, both = [], [], []
    for number in range(_REPEATS + 1):
        began = time.perf_counter()
        rows = open_rows(folder, num_rows, SAMPLE_SLOT_SIZES, cache=scratch / f"cache {number}")
        decoded = time.perf_counter()
        order = np.random.default_rng(number).permutation(num_rows)
        for start in range(0, num_rows, batch_size):
            batch = order[start : start + batch_size]
            for values in (rows.labels, rows.dense, rows.ids):
                values.take(batch, axis=0)
        ended = time.perf_counter()
        decoding.append(num_rows / (decoded - began))
        batches.append(num_rows / (ended - decoded))
        both.append(num_rows / (ended - began))
    named = {"decoding": decoding, "batches": batches, "both": both}
    return {"num_rows": num_rows, **{name: SpeedSpread.of(values[1:]) for name, values in named.items()}}
