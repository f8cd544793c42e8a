"""Find the columns that leak the label, if the candidate's AUC is suspiciously high.

A column leaks the label if it is filled after the click or derived from the click. With a leaking
column, a model ranks the held-out rows almost perfectly. In production, the model is useless,
because the value does not exist yet. Each column is measured alone. A numeric column's AUC is the
AUC of its values. In any other column, the score of a value is the value's click rate in the
training rows. The AUC is computed from these scores. The gate only warns, and people decide whether
to remove a column.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from components.evaluation.scoring import parquet_files
from evergreen.config.features import MISSING_CATEGORY
from evergreen.contracts.manifests import RawDataset
from evergreen.contracts.raw_rows import LABEL, feature_matrix, list_matrix
from evergreen.rows.archived_rows import reading_parquet
from evergreen.runtime.errors import FROM_SCRATCH
from evergreen.statistics.metrics import roc_auc
from evergreen.storage.uris import local_path

SUSPICIOUS_AUC = 0.99
"""AUC on held-out rows above which a leak is more likely than a good model."""
_MAX_TRAINING_ROWS = 500_000
"""Maximum number of training rows from which click rates are computed. The newest rows are used."""
_BATCH_ROWS = 65_536


def column_aucs(raw: RawDataset) -> dict[str, float]:
    """Return the AUC that each column alone reaches on the held-out rows, highest first.

    Args:
        raw: The rows. Columns that the run left out are not measured.

    Returns:
        AUCs by column, each in [0.5, 1]. An AUC below 0.5 is replaced by 1 minus the AUC. Empty
        unless the held-out rows have both labels.
    """
    found = {}
    # If a column is served as one constant value, the column cannot rank rows when the candidate is
    # scored.
    for column in (
        name for name in raw.recommender.features.needed if name not in raw.excluded_columns
    ):
        labels, values = _read_column(raw, raw.holdout_uri, column)
        rates = _ClickRates(*_read_column(raw, raw.train_uri, column, newest=_MAX_TRAINING_ROWS))
        scores = [rates.of(values)]
        if column in raw.recommender.features.numeric:
            numbers = values[:, 0]
            # A missing value can leak the label too. Therefore missing values are ranked below all
            # numbers in one score, and above all numbers in another score.
            scores += [np.where(np.isnan(numbers), end, numbers) for end in (-np.inf, np.inf)]
        aucs = [roc_auc(labels, _ranks(each)) for each in scores]
        known = [max(auc, 1 - auc) for auc in aucs if auc is not None]
        if known:
            found[column] = max(known)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def describe_leak(auc: float, aucs: dict[str, float]) -> str:
    """Return the warning for a candidate with this AUC.

    Args:
        auc: The candidate's AUC.
        aucs: Each column's own AUC, as returned by `column_aucs`.
    """
    too_good = (
        f"auc {auc:.4f} is above {SUSPICIOUS_AUC:g}, which is hardly possible before the "
        "outcome is known"
    )
    leaks = {column: each for column, each in aucs.items() if each > SUSPICIOUS_AUC}
    if not leaks:
        best = next(
            (f", {column} comes closest with {each:.4f}" for column, each in aucs.items()), ""
        )
        return (
            f"{too_good}: no column predicts the label alone{best}; check which columns are "
            "filled after the click"
        )
    named = ", ".join(f"{column} ({each:.4f})" for column, each in leaks.items())
    verb, them = ("predicts", "it") if len(leaks) == 1 else ("predict", "them")
    return (
        f"{too_good}: {named} {verb} the label alone. If this value is not known before the "
        f"click, remove {them} from the recommender's features, accept the changed file, and "
        f"train from scratch by `evergreen run {FROM_SCRATCH}`"
    )


class _ClickRates:
    """Click rate of each value of a column in the training rows."""

    def __init__(self, labels: NDArray[np.int8], values: NDArray[Any]) -> None:
        rows, entries = _entries(values)
        self._rate = float(labels.mean()) if len(labels) else 0.5
        self._values, index = np.unique(entries, return_inverse=True)
        clicks = np.bincount(index, weights=labels[rows], minlength=len(self._values))
        # A value's click rate is smoothed by one additional row with the overall click rate,
        # because a value with few rows is weak evidence.
        self._rates = (clicks + self._rate) / (np.bincount(index, minlength=len(self._values)) + 1)

    def of(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """Return a click rate for each row [n].

        The rate of a list is the mean of the rates of its values. Values without training rows have
        the overall rate.
        """
        rows, entries = _entries(values)
        rates = np.full(len(entries), self._rate)
        if len(self._values):
            at = np.minimum(np.searchsorted(self._values, entries), len(self._values) - 1)
            is_known = (self._values[at] == entries) | (
                np.isnan(self._values[at]) & np.isnan(entries)
            )
            rates[is_known] = self._rates[at[is_known]]
        averages: NDArray[np.float64] = np.bincount(
            rows, weights=rates, minlength=len(values)
        ) / np.bincount(rows, minlength=len(values))
        return averages


def _entries(values: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Return the row and the value of each entry in `values` [n, slots].

    A row without values gets one entry with the missing value.
    """
    is_entry = np.ones(values.shape, bool)
    if values.shape[1] > 1:
        is_entry = values != MISSING_CATEGORY
        is_entry[:, 0] |= ~is_entry.any(axis=1)
    rows, _ = np.nonzero(is_entry)
    return rows, values[is_entry]


def _ranks(scores: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the rank of each score as a finite number. Equal scores have equal ranks."""
    ranks: NDArray[np.int64] = np.unique(scores, return_inverse=True)[1]
    return ranks


def _read_column(
    raw: RawDataset, uri: str, column: str, *, newest: int | None = None
) -> tuple[NDArray[np.int8], NDArray[Any]]:
    """Read the labels [n] and one column's values [n, slots].

    If `newest` is given, only the newest batches are read. Reading stops after the batch in which
    the number of rows reaches `newest`. Missing numbers are NaN, and missing categories are -1.
    """
    features = raw.recommender.features
    labels, values, num_rows = [np.zeros(0, np.int8)], [], 0
    for batch in _newest_first(local_path(uri), [LABEL, column]):
        labels.append(batch.column(LABEL).to_numpy(zero_copy_only=False).astype(np.int8))
        if column in features.lists:
            values.append(list_matrix(batch.column(column), features.list_options_of(column)))
        elif column in features.numeric:
            values.append(feature_matrix(batch, [column], "float64", missing=np.nan))
        else:
            values.append(feature_matrix(batch, [column], "int64", missing=MISSING_CATEGORY))
        num_rows += batch.num_rows
        if newest is not None and num_rows >= newest:
            break
    return np.concatenate(labels), np.concatenate(values) if values else np.zeros((0, 1))


def _newest_first(folder: Path, columns: list[str]) -> Iterator[Any]:
    """Yield Arrow record batches of these columns, starting with the last file."""
    for path in reversed(parquet_files(folder)):
        with reading_parquet(path), pq.ParquetFile(path) as file:
            for group in reversed(range(file.num_row_groups)):
                yield from file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns)
