"""Criteo 1TB's form, and the Kaggle challenge's `train.txt`: tab-separated, no header, label first; gzip or plain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.extraction.raw_schema import CLICK_COLUMNS
from components.extraction.readers.fields import Layout, read_rows
from components.extraction.set_aside import SetAside

LAYOUT = Layout(delimiter="\t", columns=CLICK_COLUMNS, has_header=False)


@dataclass(frozen=True, kw_only=True)
class CriteoTsv:
    """One `day_N[.gz]`, `*.tsv[.gz]` or `*.txt[.gz]`."""

    path: Path

    def batches(self, set_aside: SetAside) -> Iterator[Any]:
        """See `Reader.batches`."""
        return read_rows(self.path, LAYOUT, set_aside)
