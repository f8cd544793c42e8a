"""What holds whatever the values are: rows are there, and the files have the columns that were agreed on."""

from __future__ import annotations

from collections.abc import Sequence

from components.validation.rows import ColumnFault
from components.validation.rules.catalogue import DATASET, Finding
from components.validation.rules.judging import Judging


def judge_structure(faults: Sequence[ColumnFault], num_rows: int, judging: Judging) -> list[Finding]:
    """Findings on no rows and on columns that a file lacks, holds in another type or has beyond the agreed ones."""
    found = []
    if not num_rows:
        found += judging.find(DATASET, "rule", "no_rows", "there are no training rows, expected at least 1")
    for fault in faults:
        found += judging.find(fault.column, "rule", fault.rule, fault.description)
    return found
