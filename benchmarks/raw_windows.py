"""Write windows of raw rows for benchmarks of preprocessing, in extraction's format.

Columns have 4 to 400,000 categories, with frequencies of a power law (Zipf 1.2). Dense values are
log-normal. Columns lack up to 36 % of their values. A later window also has categories that are
missing in the first window.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from evergreen.config.features import MAX_CATEGORY
from evergreen.contracts.criteo import CATEGORICAL, CRITEO_RECOMMENDER, DENSE
from evergreen.contracts.raw_rows import LABEL
from testing.validation_models import make_dataset

GROUP_ROWS = 65_536
HOLDOUT_SHARE = 0.1
MOST_CATEGORIES, FEWEST = 400_000, 4
NEW_SHARE = 0.02
"""Share of the rows of a later window that have a new category. The share is the same in every
column."""


def write_window(
    folder: Path, num_rows: int, *, seed: int, is_later: bool = False, group_rows: int = GROUP_ROWS
) -> Path:
    """Write a window into the new folder `folder`, and return the path of its manifest."""
    counts = {"train": round(num_rows * (1 - HOLDOUT_SHARE))}
    counts["holdout"] = num_rows - counts["train"]
    for number, (part, rows) in enumerate(counts.items()):
        (folder / part).mkdir(parents=True)
        _write(
            folder / part / "part-00000.parquet",
            rows,
            np.random.default_rng([seed, number]),
            is_later=is_later,
            group_rows=group_rows,
        )
    manifest = replace(
        make_dataset(
            folder / "train",
            counts["train"],
            last_event_time=f"2026-01-{2 + is_later:02d}T00:00:00+00:00",
            recommender=CRITEO_RECOMMENDER,
        ),
        holdout_uri=(folder / "holdout").as_uri(),
        num_holdout_rows=counts["holdout"],
    )
    manifest.write(folder / "raw_dataset.json")
    return folder / "raw_dataset.json"


def _write(
    path: Path, rows: int, random: np.random.Generator, *, is_later: bool, group_rows: int
) -> None:
    """Write the rows in row groups, so that a large window needs little memory."""
    writer = None
    for begin in range(0, rows, group_rows):
        table = _random_raw_table(min(group_rows, rows - begin), random, is_later)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    if writer:
        writer.close()


def _random_raw_table(rows: int, random: np.random.Generator, is_later: bool) -> pa.Table:
    columns = {LABEL: pa.array((random.random(rows) < 0.25).astype(np.int32))}
    for i, name in enumerate(DENSE):
        values = np.floor(random.lognormal(1 + 0.2 * i, 1.2, rows)).astype(np.float32)
        columns[name] = pa.array(values, mask=random.random(rows) < 0.03 * i)
    for i, name in enumerate(CATEGORICAL):
        cardinality = int(FEWEST * (MOST_CATEGORIES / FEWEST) ** (i / (len(CATEGORICAL) - 1)))
        keys = np.random.default_rng(1000 + i).integers(0, MAX_CATEGORY, 2 * cardinality)
        ranks = np.minimum(random.zipf(1.2, rows) - 1, cardinality - 1)
        if is_later:
            ranks += cardinality * (random.random(rows) < NEW_SHARE)
        columns[name] = pa.array(keys[ranks], mask=random.random(rows) < 0.02 * (i % 4))
    return pa.table(columns)
