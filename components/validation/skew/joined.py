"""Rows that were trained on and served under one name, compared value by value.

A row's name is (request_id, row). Values are the same if they are the same bits but for the sign of zero; two missing
values are the same, a missing and a present one are not. The interval of the share of rows that differ takes the rows
of a request for alike (`interval`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from components.contracts import criteo
from components.contracts.metrics import Z_95

MAX_RATIOS = 20_000
"""Values of a feature whose ratio is kept for its median."""
_EQUAL_RATIOS = 0.9
"""Share of the ratios that must agree with their median before it is told as a factor."""


@dataclass
class FeatureCounts:
    """What was seen of one feature on the joined rows."""

    differing: int = 0
    only_training: int = 0
    """Rows with a value in training and none as served."""
    only_served: int = 0
    squares: float = 0.0
    """Sum over requests of (rows that differ)^2."""
    products: float = 0.0
    """Sum over requests of rows that differ times rows."""
    ratios: list[NDArray[np.float64]] = field(default_factory=list)
    """Training over served, where both are numbers and not zero; of the first rows that differ."""
    example: dict[str, Any] | None = None

    def factor(self) -> float | None:
        """The one factor between training and served values; None where there is none."""
        ratios = np.concatenate(self.ratios) if self.ratios else np.zeros(0)
        if not len(ratios):
            return None
        middle = float(np.median(ratios))
        agreeing = np.isclose(ratios, middle, rtol=1e-3).mean()
        return middle if agreeing >= _EQUAL_RATIOS else None


class JoinedRows:
    """Counts parts of two sides; request ids of one part are in no other."""

    def __init__(self, features: Sequence[str]) -> None:
        """Nothing is counted yet."""
        self.features = {name: FeatureCounts() for name in features}
        self.joined = self.only_training = self.only_served = 0
        self.requests = 0
        """Requests with a joined row."""
        self._square_sizes = 0.0

    def add(self, training: pa.Table, served: pa.Table) -> None:
        """Counts one part in; a name that is there twice on a side counts once, by its first row."""
        if not training.num_rows or not served.num_rows:
            self.only_training += training.num_rows
            self.only_served += served.num_rows
            return
        of_training, of_served, requests = _join(training, served)
        self.joined += len(of_training)
        self.only_training += training.num_rows - len(of_training)
        self.only_served += served.num_rows - len(of_served)
        if not len(of_training):
            return
        _, group = np.unique(requests, return_inverse=True)
        sizes = np.bincount(group)
        self.requests += len(sizes)
        self._square_sizes += float((sizes.astype(np.float64) ** 2).sum())
        mine, theirs = training.take(pa.array(of_training)), served.take(pa.array(of_served))
        for name, counts in self.features.items():
            _compare(name, mine, theirs, group, sizes, counts)

    def interval(self, name: str) -> tuple[float, float] | None:
        """95 % interval of the share of rows in which the feature differs; None without joined rows.

        Wilson's, for as many independent rows as give the variance of the ratio over requests (Korn and Graubard,
        Confidence intervals for proportions with small expected number of positive counts, 1998); where all rows or
        none differ, for as many as there are requests.
        """
        if not self.joined:
            return None
        counts, rows, requests = self.features[name], self.joined, self.requests
        share = counts.differing / rows
        effective = float(requests)
        if 0 < share < 1 and requests > 1:
            spread = counts.squares - 2 * share * counts.products + share**2 * self._square_sizes
            variance = max(spread, 0.0) / rows**2 * requests / (requests - 1)
            effective = min(float(rows), share * (1 - share) / variance) if variance > 0 else float(rows)
        return _wilson(share, effective)


def _wilson(share: float, rows: float) -> tuple[float, float]:
    spread = Z_95**2 / rows
    middle = (share + spread / 2) / (1 + spread)
    half = Z_95 / (1 + spread) * math.sqrt(share * (1 - share) / rows + spread / (4 * rows))
    return max(0.0, middle - half), min(1.0, middle + half)


def _join(training: pa.Table, served: pa.Table) -> tuple[Any, Any, Any]:
    """Places [n] in both tables of the rows that both have, in training's order, and a number per row's request."""
    ids = pa.concat_arrays(
        [chunk for table in (training, served) for chunk in table.column(criteo.REQUEST_ID).chunks]
    ).dictionary_encode()
    requests = ids.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    rows = np.concatenate([table.column(criteo.ROW).to_numpy() for table in (training, served)]).astype(np.int64)
    names = (requests << 32) | rows.astype(np.uint32).astype(np.int64)
    mine, first_mine = np.unique(names[: training.num_rows], return_index=True)
    theirs, first_theirs = np.unique(names[training.num_rows :], return_index=True)
    both, at_mine, at_theirs = np.intersect1d(mine, theirs, assume_unique=True, return_indices=True)
    of_training, of_served = first_mine[at_mine], first_theirs[at_theirs]
    order = np.argsort(of_training)
    return of_training[order], of_served[order], (both >> 32)[order]


def _compare(name: str, training: pa.Table, served: pa.Table, group: Any, sizes: Any, counts: FeatureCounts) -> None:
    mine, theirs = _values(training, name), _values(served, name)
    if name in criteo.DENSE:
        missing_mine, missing_theirs = np.isnan(mine), np.isnan(theirs)
    else:
        missing_mine, missing_theirs = mine == criteo.MISSING_CATEGORY, theirs == criteo.MISSING_CATEGORY
    differs = (mine != theirs) & ~(missing_mine & missing_theirs)
    if not differs.any():
        return
    of_request = np.bincount(group, weights=differs, minlength=len(sizes))
    counts.differing += int(differs.sum())
    counts.only_training += int((differs & missing_theirs).sum())
    counts.only_served += int((differs & missing_mine).sum())
    counts.squares += float((of_request**2).sum())
    counts.products += float((of_request * sizes).sum())
    if counts.example is None:
        counts.example = _example(training, name, mine, theirs, int(differs.argmax()))
    if name in criteo.DENSE and sum(map(len, counts.ratios)) < MAX_RATIOS:
        both = differs & np.isfinite(mine) & np.isfinite(theirs) & (mine != 0) & (theirs != 0)
        counts.ratios.append(mine[both].astype(np.float64)[:MAX_RATIOS] / theirs[both][:MAX_RATIOS])


def _values(table: pa.Table, name: str) -> Any:
    kind, missing = ("float32", np.nan) if name in criteo.DENSE else ("int64", criteo.MISSING_CATEGORY)
    return table.column(name).cast(kind).fill_null(missing).to_numpy()


def _example(training: pa.Table, name: str, mine: Any, theirs: Any, place: int) -> dict[str, Any]:
    def shown(value: Any) -> float | int | None:
        if name in criteo.CATEGORICAL:
            return None if value == criteo.MISSING_CATEGORY else int(value)
        return float(value) if math.isfinite(value) else None

    return {
        "request_id": training.column(criteo.REQUEST_ID)[place].as_py(),
        "row": training.column(criteo.ROW)[place].as_py(),
        "training": shown(mine[place]),
        "served": shown(theirs[place]),
    }
