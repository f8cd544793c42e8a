"""Ranks candidates for one context: scores them all, keeps the best k, and remembers what was shown where.

The record of a ranking carries its session and positions, which hit rate@k needs. Scoring is `client`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from components.contracts.criteo import MISSING_CATEGORY, NUM_CATEGORICAL, NUM_DENSE
from components.contracts.errors import ContractError
from components.contracts.records import PredictionBatch
from inference_client.client import ScoringClient


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureRows:
    """Rows of raw features."""

    dense: NDArray[np.float32]
    """[n, 13], NaN = missing."""
    categorical: NDArray[np.int64]
    """[n, 26], -1 = missing."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranking:
    """The best candidates, best first."""

    session_id: str
    candidates: NDArray[np.int64]
    """[k] row of each among the candidates asked for."""
    scores: NDArray[np.float32]
    """[k], falling."""
    model_version: int
    rows: FeatureRows
    """The k rows as they were scored."""

    @property
    def positions(self) -> NDArray[np.int32]:
        """[k] place in the list, from 1."""
        return np.arange(1, len(self.scores) + 1, dtype=np.int32)

    def record(self, time: float) -> PredictionBatch:
        """The prediction record of what was shown; `time` is seconds since the epoch. Row i of outcomes is place i+1.

        Only the k rows shown are recorded: nobody can click what was not shown.
        """
        return PredictionBatch(
            request_id=self.session_id,
            time=time,
            model_version=self.model_version,
            dense=self.rows.dense,
            categorical=self.rows.categorical,
            scores=self.scores,
            session_id=self.session_id,
            positions=self.positions,
        )


async def rank(
    client: ScoringClient, context: FeatureRows, candidates: FeatureRows, k: int, *, session_id: str | None = None
) -> Ranking:
    """The `k` candidates of highest click probability; equal scores keep the order given.

    Args:
        client: Where to score.
        context: One row; its features fill those that a candidate lacks (the user's side of the row).
        candidates: n rows.
        k: At most this many; fewer where there are fewer candidates.
        session_id: Names the list; random without one.

    Raises:
        ContractError: k is below 1, or the context is not one row.
    """
    if k < 1:
        raise ContractError(f"k is {k}, expected at least 1")
    if context.dense.shape != (1, NUM_DENSE) or context.categorical.shape != (1, NUM_CATEGORICAL):
        raise ContractError(f"context has shapes {context.dense.shape} and {context.categorical.shape}, expected 1 row")
    dense = np.where(np.isnan(candidates.dense), context.dense, candidates.dense)
    lacks = candidates.categorical == MISSING_CATEGORY
    categorical = np.where(lacks, context.categorical, candidates.categorical)
    scored = await client.score(dense, categorical)
    best = np.argsort(-scored.scores, kind="stable")[:k]
    return Ranking(
        session_id=session_id or uuid4().hex,
        candidates=best,
        scores=scored.scores[best],
        model_version=scored.model_version,
        rows=FeatureRows(dense=dense[best], categorical=categorical[best]),
    )
