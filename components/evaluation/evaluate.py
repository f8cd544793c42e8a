"""The steps of an evaluation: check the inputs, score the held-out rows, decide, store the scores.

Other modules of this package read, score and check the rows, and draw the report.
"""

import io
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.evaluation.exploration import read_shown, reordering_gain
from components.evaluation.gate import (
    GateDecision,
    decide,
    measure_rows,
    measure_slices,
    slice_masks,
)
from components.evaluation.leaks import SUSPICIOUS_AUC, column_aucs, describe_leak
from components.evaluation.scoring import (
    ScoredHoldout,
    candidate_scorer,
    champion_scorer,
    score_holdout,
)
from evergreen.config.gate import GateSettings
from evergreen.contracts import checks as contract
from evergreen.contracts.category_texts import ShownValues, read_texts
from evergreen.contracts.checks import FAIL
from evergreen.contracts.manifests import CURRENT, Model, RawDataset, Release, TrainingSet, Verdict
from evergreen.contracts.workflow import FeatureWorkflow, vocabulary_changes
from evergreen.registry.model_cards import SliceQuality
from evergreen.registry.models import model_in, verified_part
from evergreen.runtime.durable import whole_directory, write_whole
from evergreen.runtime.errors import ContractError, Refused
from evergreen.storage.uris import local_path

logger = logging.getLogger(__name__)

_SCORES_FILE = "scores.npz"


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """The verdict, and the numbers that the report draws."""

    verdict: Verdict
    scored: ScoredHoldout
    slices: list[SliceQuality]
    settings: GateSettings


def evaluate(
    *,
    raw: RawDataset,
    training_set: TrainingSet,
    model: Model,
    champion: Release | None,
    champion_reference: str = CURRENT,
    settings: GateSettings,
    final: Path,
) -> Evaluation:
    """Evaluate `model` on the held-out rows.

    Args:
        raw: The rows.
        training_set: The same rows, encoded with the candidate's workflow.
        model: The candidate.
        champion: The release for the comparison. None skips the comparison with a champion, so that
            only the floor and the calibration are checked.
        champion_reference: How the run chose the champion. The verdict records this choice.
        settings: The limits.
        final: Folder for the scores. A folder of an earlier try is replaced.

    Raises:
        ContractError: The inputs do not belong together, or an input is corrupt.
        Refused: The champion changed since extraction.
    """
    _expect_same_run(raw, training_set, model)
    _expect_same_champion(raw, champion)
    score = partial(
        score_holdout,
        features=raw.recommender.features,
        named=raw.recommender.data,
        score_candidate=candidate_scorer(model),
        score_champion=champion_scorer(champion, raw.recommender.features) if champion else None,
        slot_sizes=training_set.slot_sizes,
        new_ids=_new_ids(training_set),
    )
    scored, old = _score_both(raw, training_set, score)
    slices = slice_masks(
        scored, is_first_run=training_set.parent_model_uri is None, shown=shown_values(raw)
    )
    decided = check_holdout(scored, slices, settings)
    for check in decided.checks:
        logger.info("gate: %s", contract.sentence(check))
    quality = measure_rows(scored, decided.estimates)
    aucs, warnings = _find_leaks(raw, quality.candidate.auc)
    verdict = Verdict(
        candidate_model_id=model.model_id,
        champion_model_id=champion.model_id if champion else None,
        decision=decided.decision,
        accepted=decided.decision != FAIL,
        reason=contract.headline(decided.checks),
        num_rows=quality.num_rows,
        num_clicks=quality.num_clicks,
        candidate=quality.candidate,
        champion=quality.champion,
        difference=quality.difference,
        scores_uri=_store_scores(final, scored).as_uri(),
        old_distribution=measure_rows(old) if old else None,
        reordering_gain=reordering_gain(read_shown(local_path(raw.holdout_uri), scored)),
        champion_reference=champion_reference,
        column_aucs=aucs,
        warnings=warnings,
        advice=contract.advice(decided.checks),
        checks=list(decided.checks),
    )
    measured = measure_slices(scored, slices, decided.slice_p_values)
    return Evaluation(verdict=verdict, scored=scored, slices=measured, settings=settings)


def _find_leaks(raw: RawDataset, auc: float | None) -> tuple[dict[str, float], list[str]]:
    """Return each column's own AUC and a warning.

    The dictionary and the list are empty unless the candidate's AUC is suspiciously high.
    """
    if auc is None or auc <= SUSPICIOUS_AUC:
        return {}, []
    aucs = column_aucs(raw)
    warning = describe_leak(auc, aucs)
    logger.warning("gate: %s", warning)
    return aucs, [warning]


def _score_both(
    raw: RawDataset, training_set: TrainingSet, score: Callable[..., ScoredHoldout]
) -> tuple[ScoredHoldout, ScoredHoldout | None]:
    """Score the held-out rows of the window, and any held-out rows of earlier days."""
    counts = (raw.num_holdout_rows, training_set.num_holdout_rows)
    scored = score(raw.holdout_uri, training_set.holdout_uri, counts=counts)
    if not raw.replay_holdout_uri or not training_set.replay_holdout_uri:
        return scored, None
    counts = (raw.num_replay_holdout_rows, training_set.num_replay_holdout_rows)
    return scored, score(raw.replay_holdout_uri, training_set.replay_holdout_uri, counts=counts)


def check_holdout(
    scored: ScoredHoldout, slices: Mapping[str, NDArray[np.bool_]], settings: GateSettings
) -> GateDecision:
    """Check the scored rows with `gate.decide`."""
    return decide(
        scored.labels,
        scored.candidate,
        scored.champion,
        groups=scored.groups,
        weights=scored.weights,
        slices=slices,
        settings=settings,
    )


def _new_ids(training_set: TrainingSet) -> list[NDArray[np.int64]]:
    """Return the ids that were assigned in this run, by column."""
    now = FeatureWorkflow.load(local_path(training_set.workflow_uri))
    parent = training_set.parent_model_uri
    before = (
        FeatureWorkflow.load(verified_part(model_in(local_path(parent)), Model.WORKFLOW))
        if parent
        else None
    )
    return [change.entered for change in vocabulary_changes(before, now)]


def shown_values(raw: RawDataset) -> ShownValues:
    """Return the names of a run's categories, and the columns whose values are hidden."""
    texts = read_texts(local_path(raw.texts_uri)) if raw.texts_uri else {}
    return ShownValues(texts=texts, hidden=raw.recommender.columns_of_users)


def _expect_same_run(raw: RawDataset, training_set: TrainingSet, model: Model) -> None:
    if training_set.raw_digest != raw.digest:
        raise ContractError(
            f"training set has raw rows with digest {training_set.raw_digest}, expected digest "
            f"{raw.digest}"
        )
    if model.raw_digest != raw.digest:
        raise ContractError(
            f"model {model.model_id} was trained on raw rows with digest {model.raw_digest}, "
            f"expected digest {raw.digest}"
        )
    if model.slot_sizes != training_set.slot_sizes:
        raise ContractError(
            f"model {model.model_id} has {sum(model.slot_sizes)} ids and the training set "
            f"{sum(training_set.slot_sizes)}, expected the same slot sizes"
        )
    if (raw.replay_holdout_uri is None) != (training_set.replay_holdout_uri is None):
        raise ContractError(
            f"raw dataset has {raw.num_replay_holdout_rows} old holdout rows and the training "
            f"set has {training_set.num_replay_holdout_rows}, expected the same number"
        )


def _expect_same_champion(raw: RawDataset, champion: Release | None) -> None:
    """Refuse a champion that extraction did not choose.

    Another champion may have been trained on the held-out rows.
    """
    found = champion.model_id if champion else None
    if found != raw.champion_model_id:
        raise Refused(
            f"champion is {found or 'none'}, expected {raw.champion_model_id or 'none'}: the "
            "champion changed after extraction, so it may have been trained on the held-out "
            "rows; run the pipeline again"
        )


def _store_scores(final: Path, scored: ScoredHoldout) -> Path:
    arrays: dict[str, Any] = {"candidate": scored.candidate}
    if scored.champion is not None:
        arrays["champion"] = scored.champion
    content = io.BytesIO()
    np.savez(content, **arrays)
    with whole_directory(final, replace=True) as folder:
        write_whole(folder / _SCORES_FILE, content.getvalue())
    return final / _SCORES_FILE
