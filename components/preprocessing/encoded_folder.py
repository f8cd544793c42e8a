"""One folder in HugeCTR's form out of the folders that NVTabular wrote for its shares.

NVTabular writes beside its Parquet files what HugeCTR and others ask about them: `_metadata.json` (rows per file, place
of each column), `_file_list.txt`, `_metadata` (all footers) and the schema, `schema.pbtxt` and `.merlin/`. Each share
of the rows has its own; together they are here made those of all rows.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq

from components.contracts.hugectr_folder import write_file_list
from components.runtime.durable import write_whole

METADATA, FOOTERS = "_metadata.json", "_metadata"


def merge(parts: Sequence[Path], folder: Path, *, final: Path) -> None:
    """Moves the files of `parts`, folders of consecutive rows, into the new folder `folder`.

    Args:
        parts: At least one; file names differ between them. They are gone then.
        folder: Must not be there.
        final: Where the folder will lie, as the file list says it.
    """
    documents = [json.loads((part / METADATA).read_text()) for part in parts]
    stats = [stat for document in documents for stat in document["file_stats"]]
    names = [stat["file_name"] for stat in stats]
    os.rename(parts[0], folder)
    for part, document in zip(parts[1:], documents[1:]):
        for stat in document["file_stats"]:
            os.rename(part / stat["file_name"], folder / stat["file_name"])
        shutil.rmtree(part)
    if len(parts) > 1:
        write_whole(folder / METADATA, json.dumps({**documents[0], "file_stats": stats}))
        _write_footers(folder, names)
    write_file_list(folder, names, final=final)  # NVTabular's own names the folder that it wrote to


def _write_footers(folder: Path, names: Sequence[str]) -> None:
    footers = [pq.read_metadata(folder / name) for name in names]
    for footer, name in zip(footers, names):
        footer.set_file_path(name)
    for footer in footers[1:]:
        footers[0].append_row_groups(footer)
    footers[0].write_metadata_file(str(folder / FOOTERS))
