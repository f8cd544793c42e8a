"""Evaluates one candidate: checks that the inputs belong together, scores, judges, keeps the scores.

Reading rows, scoring, judging and drawing are the modules beside this one; this one only puts them in order.
"""

from __future__ import annotations

import io
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.contracts.durable import whole_directory, write_whole
from components.contracts.errors import ContractError
from components.contracts.manifests import Model, RawDataset, Release, TrainingSet, Verdict
from components.contracts.metrics import AucEstimate, calibration, log_loss, normalized_entropy
from components.contracts.uris import local_path
from components.evaluation.gate import GateSettings, Judgement, judge
from components.evaluation.holdout import check_counts
from components.evaluation.scoring import ScoredHoldout, candidate_scorer, champion_scorer, score_holdout
from components.evaluation.slices import SliceMetrics, measure_slices, slice_column

logger = logging.getLogger(__name__)

SCORES_FILE = "scores.npz"


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """The verdict, and what the report draws."""

    verdict: Verdict
    scored: ScoredHoldout
    slices: list[SliceMetrics]
    settings: GateSettings


def evaluate(
    *,
    raw: RawDataset,
    training_set: TrainingSet,
    model: Model,
    champion: Release | None,
    settings: GateSettings,
    final: Path,
) -> Evaluation:
    """The evaluation of `model` on the held-out rows.

    Args:
        raw: The raw rows.
        training_set: The same rows, encoded with the candidate's workflow.
        model: The candidate.
        champion: The release that it must not be worse than; None = judged by the floor alone.
        settings: The gate's thresholds.
        final: Folder for the scores; one left by an earlier try is replaced.

    Raises:
        ContractError: the inputs do not belong together, or one is damaged.
    """
    _expect_same_round(raw, training_set, model)
    raw_folder, encoded_folder = local_path(raw.holdout_uri), local_path(training_set.holdout_uri)
    num_rows = check_counts(raw_folder, encoded_folder, raw.num_holdout_rows, training_set.num_holdout_rows)
    logger.info("scoring %d held-out rows, champion: %s", num_rows, champion.model_id if champion else None)
    column = slice_column(training_set.slot_sizes)
    scored = score_holdout(
        raw_folder,
        encoded_folder,
        score_candidate=candidate_scorer(model),
        score_champion=champion_scorer(champion) if champion else None,
        slot_sizes=training_set.slot_sizes,
        new_categories=training_set.new_categories,
        slice_column=column,
    )
    judgement = judge(scored.labels, scored.candidate, scored.champion, settings=settings)
    logger.info("gate: %s", judgement.reason)
    verdict = _verdict(model, champion, scored, judgement, scores=_keep_scores(final, scored))
    is_first_round = training_set.parent_model_uri is None
    slices = measure_slices(scored, column=column, is_first_round=is_first_round)
    return Evaluation(verdict=verdict, scored=scored, slices=slices, settings=settings)


def _expect_same_round(raw: RawDataset, training_set: TrainingSet, model: Model) -> None:
    if training_set.raw_digest != raw.digest:
        raise ContractError(f"training set is of raw data {training_set.raw_digest}, expected {raw.digest}")
    if model.raw_digest != raw.digest:
        raise ContractError(f"model {model.model_id} is of raw data {model.raw_digest}, expected {raw.digest}")
    if model.slot_sizes != training_set.slot_sizes:
        raise ContractError(
            f"model {model.model_id} has {sum(model.slot_sizes)} ids and the training set "
            f"{sum(training_set.slot_sizes)}, expected the same slot sizes"
        )


def _verdict(
    model: Model, champion: Release | None, scored: ScoredHoldout, judgement: Judgement, *, scores: Path
) -> Verdict:
    difference = judgement.difference
    return Verdict(
        candidate_model_id=model.model_id,
        champion_model_id=champion.model_id if champion else None,
        decision=judgement.decision,
        accepted=judgement.accepted,
        reason=judgement.reason,
        num_rows=len(scored.labels),
        num_clicks=int(scored.labels.sum()),
        candidate=_metrics(scored.labels, scored.candidate, judgement.candidate),
        champion=_metrics(scored.labels, scored.champion, judgement.champion) if scored.champion is not None else None,
        difference={
            "auc": difference.auc if difference else None,
            "low": difference.low if difference else None,
            "high": difference.high if difference else None,
            "p_value": difference.p_value if difference else None,
        }
        if champion
        else None,
        rows_needed=judgement.rows_needed,
        scores_uri=scores.as_uri(),
    )


def _metrics(
    labels: NDArray[np.int8], scores: NDArray[np.float32], estimate: AucEstimate | None
) -> dict[str, float | None]:
    return {
        "auc": estimate.auc if estimate else None,
        "auc_low": estimate.low if estimate else None,
        "auc_high": estimate.high if estimate else None,
        "log_loss": log_loss(labels, scores),
        "normalized_entropy": normalized_entropy(labels, scores),
        "calibration": calibration(labels, scores),
    }


def _keep_scores(final: Path, scored: ScoredHoldout) -> Path:
    arrays: dict[str, Any] = {"candidate": scored.candidate}
    if scored.champion is not None:
        arrays["champion"] = scored.champion
    content = io.BytesIO()
    np.savez(content, **arrays)
    with whole_directory(final, replace=True) as folder:
        write_whole(folder / SCORES_FILE, content.getvalue())
    return final / SCORES_FILE
