"""Listed objects as files of this machine, in their order, a bounded part of them at a time; for who reads each once.

What is asked for again and again is kept elsewhere: extraction's lake has a cache.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from components.storage.growing import unheard
from components.storage.objects import ObjectInfo, Objects
from components.storage.transfer import Errand, transfer

logger = logging.getLogger(__name__)

BATCH_BYTES = 256 << 20
"""Fetched together: enough small files for all transfers, and no more of the disk."""


def fetched_files(
    objects: Objects, wanted: Sequence[ObjectInfo], scratch: Path, *, batch_bytes: int = BATCH_BYTES
) -> Iterator[tuple[ObjectInfo, Path]]:
    """Yields each object with its file, which is gone when the next one is asked for.

    At most `batch_bytes` lie on the disk, or one object that is larger. Each is the write that was listed, proven by
    its checksum.

    Args:
        objects: Where they are.
        wanted: As they were listed.
        scratch: Folder for the files; nothing stays in it.
        batch_bytes: See `BATCH_BYTES`.

    Raises:
        Changed: an object was replaced or removed since it was listed.
        TemporaryError, PermanentError: it cannot be fetched; also where the disk has no room.
    """
    for batch in _batches(wanted, batch_bytes):
        with TemporaryDirectory(dir=scratch, prefix=".fetched-") as folder:
            errands = [Errand(each, Path(folder, f"{n}.part"), Path(folder, str(n))) for n, each in enumerate(batch)]
            transfer(objects, errands, arrived=unheard, finished=lambda: None)
            for errand in errands:
                yield errand.wanted, errand.path
                errand.path.unlink()
        logger.info("%s: read %d files to %s", objects.uri, len(batch), batch[-1].name)


def _batches(wanted: Sequence[ObjectInfo], batch_bytes: int) -> Iterator[list[ObjectInfo]]:
    batch: list[ObjectInfo] = []
    for each in wanted:
        if batch and sum(one.size for one in batch) + each.size > batch_bytes:
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch
