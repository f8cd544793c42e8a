"""What a champion's rows are known by: its kept windows, or, of an older model, what it kept for the monitor.

The latter does not tell how alike rows of one request were; a comparison then takes these rows' likeness for both.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from components.contracts.manifests import Model
from components.contracts.reference_statistics import CategoryColumn, ReferenceStatistics, read_reference
from components.validation.kept_windows import KeptWindows, read_windows
from components.validation.windows import ColumnSummary, Total, WindowSummary

logger = logging.getLogger(__name__)


def read_champion(model: Path) -> tuple[KeptWindows | None, KeptWindows]:
    """What rows are compared with, None where the model kept nothing; and the windows that its line hands on.

    Args:
        model: The champion's folder in the model store.

    Raises:
        ContractError: a file is damaged.
    """
    if (model / Model.WINDOWS).exists():
        kept = read_windows(model / Model.WINDOWS)
        return kept, kept
    logger.info("the champion keeps no windows: it is older than they are")
    if (model / Model.REFERENCE).exists():
        return KeptWindows((window_of_reference(read_reference(model / Model.REFERENCE)),)), KeptWindows(())
    return None, KeptWindows(())


def window_of_reference(reference: ReferenceStatistics) -> WindowSummary:
    """The rows of `reference` as a window whose requests, clicks and times are not known."""
    columns = {}
    for name, dense in reference.dense.items():
        columns[name] = _column(None, dense.counts, 0, dense.missing, 0)
    for name, listed in reference.categorical.items():
        columns[name] = _column(listed.values, listed.counts, listed.others, listed.missing, _floor(listed))
    return WindowSummary(
        digest="",
        first_event_time="",
        last_event_time="",
        num_windows=1,
        rows=reference.rows,
        requests=0,
        sizes=0,
        clicks=Total(),
        columns={name: column for name, column in columns.items() if name not in reference.excluded},
    )


def _floor(column: CategoryColumn) -> int:
    """Most rows of an unlisted value, very probably.

    The list was chosen by half of the rows. In the other half an unlisted value may be more frequent, by luck or by a
    request or two of 64 rows that are alike.
    """
    rarest = int(column.counts.min()) if len(column.values) else 0
    return min(column.others, 4 * rarest + 128)


def _column(
    values: NDArray[np.int64] | None, counts: NDArray[np.int64], others: int, missing: int, floor: int
) -> ColumnSummary:
    return ColumnSummary(
        values=values,
        sums=np.column_stack([counts, np.zeros_like(counts), np.zeros_like(counts)]),
        present=int(counts.sum()) + others,
        present_sizes=0,
        present_requests=0,
        missing=Total(rows=missing),
        floor=floor,
    )
