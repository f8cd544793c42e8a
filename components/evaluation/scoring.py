"""Scores of the held-out rows: the candidate's from its weights, the champion's from the graph that serves it.

The champion is scored as it answers users, raw rows through its ONNX graph: its own workflow is inside, and what the
gate compares with is what would be replaced. Judging the scores is left to `gate`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from components.contracts.dcn import DcnConfig
from components.contracts.durable import sha256_file, sha256_tree
from components.contracts.errors import ContractError
from components.contracts.manifests import Model, Release
from components.contracts.serving import CATEGORICAL_INPUT, DENSE_INPUT, PROBABILITY_OUTPUT
from components.contracts.uris import local_path
from components.contracts.workflow import FIRST_ID, OOV_ID
from components.evaluation.holdout import EncodedBatch, RawBatch, encoded_batches, raw_batches

ScoreEncoded = Callable[[EncodedBatch], NDArray[np.float32]]
ScoreRaw = Callable[[RawBatch], NDArray[np.float32]]


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoredHoldout:
    """The held-out rows as the gate and the slices need them, each [n] in row order."""

    labels: NDArray[np.int8]
    event_seconds: NDArray[np.float64]
    candidate: NDArray[np.float32]
    champion: NDArray[np.float32] | None
    has_new_category: NDArray[np.bool_]
    """Whether the row holds a category that got its id in this round."""
    has_unknown_category: NDArray[np.bool_]
    """Whether the row holds a category without an id of its own."""
    categories: NDArray[np.int64]
    """Raw values of the column that slices are cut by."""


def candidate_scorer(model: Model) -> ScoreEncoded:
    """The function that scores encoded rows with the candidate.

    Raises:
        ContractError: its files are absent, damaged or of another shape.
    """
    from components.dcn.network import load_network, predict

    weights = local_path(model.uri) / Model.WEIGHTS
    _expect_hash(f"weights of {model.model_id}", model.sha256.get("weights"), sha256_tree(weights))
    network = load_network(weights, DcnConfig.from_document(model.config), model.slot_sizes)

    def score(batch: EncodedBatch) -> NDArray[np.float32]:
        scores: NDArray[np.float32] = predict(network, batch.dense, batch.ids)
        return scores

    return score


def champion_scorer(release: Release) -> ScoreRaw:
    """The function that scores raw rows with the live release's graph.

    Raises:
        ContractError: the graph is absent, damaged, or not the one that was released.
    """
    import onnxruntime

    path = local_path(release.graph_uri)
    if not path.is_file():
        raise ContractError(f"champion graph {path} of version {release.version} is absent")
    _expect_hash(f"champion graph {path}", release.sha256.get("graph"), sha256_file(path))
    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors share no base class
        raise ContractError(f"champion graph {path} cannot be loaded: {error}") from error

    def score(batch: RawBatch) -> NDArray[np.float32]:
        inputs = {DENSE_INPUT.name: batch.dense, CATEGORICAL_INPUT.name: batch.categorical}
        (probability,) = session.run([PROBABILITY_OUTPUT.name], inputs)
        scores: NDArray[np.float32] = probability.reshape(len(batch.labels)).astype(np.float32)
        return scores

    return score


def score_holdout(
    raw: Path,
    encoded: Path,
    *,
    score_candidate: ScoreEncoded,
    score_champion: ScoreRaw | None,
    slot_sizes: list[int],
    new_categories: list[int],
    slice_column: int,
) -> ScoredHoldout:
    """Scores all held-out rows, a batch at a time.

    Args:
        raw: Folder of the raw rows.
        encoded: Folder of the same rows encoded, in the same order.
        score_candidate: See `candidate_scorer`.
        score_champion: See `champion_scorer`; None where nothing is live.
        slot_sizes: Number of ids per categorical column.
        new_categories: How many of them, the last ones, are of this round.
        slice_column: Categorical column whose raw values are kept, from 0.

    Raises:
        ContractError: the rows of the two folders are not the same.
    """
    # A column's first ids (missing, out of vocabulary) are never news.
    first_new = np.maximum(np.array(slot_sizes) - np.array(new_categories), FIRST_ID)
    parts: list[tuple[NDArray[np.generic], ...]] = []
    rows = 0
    for raw_batch, encoded_batch in zip_longest(*_aligned(raw, encoded)):
        if raw_batch is None or encoded_batch is None or not np.array_equal(raw_batch.labels, encoded_batch.labels):
            raise ContractError(f"labels of raw and encoded holdout differ after row {rows}, expected the same rows")
        rows += len(raw_batch.labels)
        parts.append(
            (
                raw_batch.labels,
                raw_batch.event_seconds,
                score_candidate(encoded_batch),
                score_champion(raw_batch) if score_champion else np.zeros(0, np.float32),
                (encoded_batch.ids >= first_new).any(axis=1),
                (encoded_batch.ids == OOV_ID).any(axis=1),
                raw_batch.categorical[:, slice_column],
            )
        )
    columns = [np.concatenate(column) for column in zip(*parts)]
    labels, event_seconds, candidate, champion, new, unknown, categories = columns
    return ScoredHoldout(
        labels=labels,
        event_seconds=event_seconds,
        candidate=candidate,
        champion=champion if score_champion else None,
        has_new_category=new,
        has_unknown_category=unknown,
        categories=categories,
    )
