"""Ranks candidates for one context: scores them all, keeps the best k, and remembers what was shown where.

The record of a ranking carries its session and positions, which hit rate@k needs. Scoring, in chunks by one version, is
`client`'s; publishing is `publisher`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from components.contracts.criteo import MISSING_CATEGORY, NUM_CATEGORICAL, NUM_DENSE
from components.contracts.records import PredictionBatch
from components.runtime.errors import ContractError
from inference_client.publisher import MAX_ROWS_PER_RECORD
from inference_client.scorer import FeatureRows, KeyedScorer, Scored, shadow_of


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
    scored: Scored
    """The answer about all candidates."""

    @property
    def positions(self) -> NDArray[np.int32]:
        """[k] place in the list, from 1."""
        return np.arange(1, len(self.scores) + 1, dtype=np.int32)

    def record(self, time: float, shadow: Scored | None = None) -> PredictionBatch:
        """The prediction record of what was shown; row i of outcomes is place i+1.

        Only the k rows shown are recorded: nobody can click what was not shown.

        Args:
            time: Seconds since the epoch, when the answer came.
            shadow: What the other arm said of all candidates.
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
            canary=self.scored.canary,
            shadow_version=None if shadow is None else shadow.model_version,
            shadow_scores=None if shadow is None else shadow.scores[self.candidates],
        )

    async def record_with_shadow(self, time: float, seconds: float) -> PredictionBatch:
        """The record, with the shadow's scores if they come within `seconds`."""
        return self.record(time, await shadow_of(self.scored, seconds))


async def rank(
    client: KeyedScorer,
    context: FeatureRows,
    candidates: FeatureRows,
    k: int,
    *,
    session_id: str | None = None,
    key: str | None = None,
) -> Ranking:
    """The `k` candidates of highest click probability; equal scores keep the order given.

    Args:
        client: Where to score; all candidates are scored by one model version, however many they are.
        context: One row; its features fill those that a candidate lacks (the user's side of the row).
        candidates: n rows, n >= 1.
        k: At most this many; fewer where there are fewer candidates.
        session_id: Names the list; random without one.
        key: Whose list it is: the same key meets the same model of a traffic plan. The session's id without one.

    Raises:
        ContractError: k is outside 1..`MAX_ROWS_PER_RECORD`, the context is not one row, or there are no candidates.
            Errors of scoring are passed on.
    """
    if not 1 <= k <= MAX_ROWS_PER_RECORD:
        raise ContractError(f"k is {k}, expected 1..{MAX_ROWS_PER_RECORD}")
    if context.dense.shape != (1, NUM_DENSE) or context.categorical.shape != (1, NUM_CATEGORICAL):
        raise ContractError(f"context has shapes {context.dense.shape} and {context.categorical.shape}, expected 1 row")
    n = len(candidates.dense)
    if not n or candidates.dense.shape != (n, NUM_DENSE) or candidates.categorical.shape != (n, NUM_CATEGORICAL):
        shapes = f"{candidates.dense.shape} and {candidates.categorical.shape}"
        raise ContractError(f"candidates have shapes {shapes}, expected (n, {NUM_DENSE}) and (n, {NUM_CATEGORICAL})")
    dense = np.where(np.isnan(candidates.dense), context.dense, candidates.dense)
    lacks = candidates.categorical == MISSING_CATEGORY
    categorical = np.where(lacks, context.categorical, candidates.categorical)
    session_id = session_id or uuid4().hex
    scored = await client.score(dense, categorical, request_id=session_id, key=key)
    best = np.argsort(-scored.scores, kind="stable")[:k]
    return Ranking(
        session_id=session_id,
        candidates=best,
        scores=scored.scores[best],
        model_version=scored.model_version,
        rows=FeatureRows(dense=dense[best], categorical=categorical[best]),
        scored=scored,
    )
