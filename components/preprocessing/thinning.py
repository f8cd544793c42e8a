"""Negative down-sampling: of the rows without a click that are to be learned, a share is kept, the same in every try.

It is done here and not in extraction, so that validation judges, and the monitor's reference counts, the rows as they
are: feature distributions, click rates and quarantine need no correction, and a later round may compare its windows
with this one's whatever rate either had. What costs most, encoding and learning, is spared all the same. Replayed rows
are thinned at the same rate, for one bias corrects them all (`training.calibration`); held-out rows never are.
Categories are counted in the rows that are kept: an id is for a category that has rows to be learned from.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from components.contracts.features import Features
from components.contracts.raw_rows import LABEL, REQUEST_ID, ROW, WEIGHT
from components.contracts.row_hash import row_identities, uniforms
from components.preprocessing.raw_partitions import open_raw, raw_files
from components.runtime.errors import ContractError
from components.store.archived_rows import reading_parquet

SALT = 0x5EED0F7415
"""Another than replay's (its salt is a time), so that the rows drawn to be replayed are thinned like all others."""
GROUP_ROWS = 65_536


def thin(
    source: Path,
    into: Path,
    negative_rate: float,
    *,
    features: Features,
    expected_rows: int,
    weighted: bool = False,
) -> int:
    """Copies what the raw rows of a folder say, without those that the rate leaves out; returns how many are kept.

    Rows keep their order, and one batch is in memory at a time. `into` is created and has one file, or none where no
    row is kept; `expected_rows` are the source's by its manifest. Weights stay as they are.

    Raises:
        ContractError: a file cannot be read or has not the raw schema's types, or the folder has another number of
            rows.
    """
    into.mkdir(parents=True)
    copied = [LABEL, *features.names, *([WEIGHT] if weighted else [])]
    columns = [*copied, REQUEST_ID, ROW]
    num_read = num_rows = 0
    with ExitStack() as stack:
        writer = None
        for path in raw_files(source):
            with reading_parquet(path):
                for batch in open_raw(path, features, columns).iter_batches(batch_size=GROUP_ROWS, columns=columns):
                    kept = pa.Table.from_batches([batch]).filter(pa.array(kept_rows(batch, negative_rate)))
                    num_read, num_rows = num_read + batch.num_rows, num_rows + kept.num_rows
                    if kept.num_rows:
                        table = kept.select(copied)
                        writer = writer or stack.enter_context(pq.ParquetWriter(into / "part.parquet", table.schema))
                        writer.write_table(table)
    if num_read != expected_rows:
        raise ContractError(f"raw folder {source} has {num_read} rows, expected the manifest's {expected_rows}")
    return num_rows


def kept_rows(batch: Any, negative_rate: float) -> Any:
    """Which rows of an Arrow batch with label, request id and row are kept: all clicks, and a share of the others.

    Decided by the row's identity alone: not by its place, nor by the rows beside it.
    """
    identities = row_identities(batch.column(REQUEST_ID), batch.column(ROW).to_numpy(zero_copy_only=False))
    clicked = pc.equal(batch.column(LABEL), 1).fill_null(True).to_numpy(zero_copy_only=False)
    return clicked | (uniforms(identities, SALT) < negative_rate)
