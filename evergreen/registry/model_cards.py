"""The model card: all facts about one model, from its training rows to its time in production.

Evaluation writes the card for the first time. Deployment writes the card again when the model is
released. The card contains the manifests themselves. Neither the manifests nor the card contain a
value of a user column. Each read of a card also reads the promotion journal again, so the data from
the journal are up to date.

Layout: `<store>/verdicts/<model_id>/card.json`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from evergreen.contracts.manifests import (
    Manifest,
    Model,
    RawDataset,
    Release,
    RowsQuality,
    ValidationReport,
    Verdict,
)
from evergreen.registry import promotion_journal
from evergreen.registry.models import model_folder, referenced_model, release_path, verdict_paths
from evergreen.registry.promotion_journal import (
    BAKED,
    CANARY,
    CANARY_ENDED,
    LIVE_ACTIONS,
    Promotion,
)
from evergreen.runtime.errors import ContractError

MAX_ANCESTORS = 50
"""Maximum number of ancestors that a card lists. With hourly runs, a lineage grows to thousands of
ancestors."""


@dataclass(frozen=True, kw_only=True)
class SliceQuality(RowsQuality):
    """Quality of both models on one slice of the holdout rows. An undefined number is None."""

    name: str
    click_rate: float | None
    p_value: float | None
    """One-sided p-value of the test whether the degradation on this slice exceeds the limit. None
    if the slice was not tested."""

    @property
    def log_loss_change(self) -> float | None:
        """Relative change of log loss.

        The change is the candidate's log loss divided by the champion's, minus 1.
        """
        now, before = self.candidate.log_loss, self.champion and self.champion.log_loss
        return now / before - 1 if now is not None and before else None


@dataclass(frozen=True, kw_only=True)
class CalibrationBin:
    """One group of holdout rows with similar scores.

    All groups of one model have the same number of rows.
    """

    num_rows: int
    mean_score: float
    click_rate: float


@dataclass(frozen=True, kw_only=True)
class Ancestor:
    """An ancestor of the model in its lineage."""

    model_id: str
    window_start: str | None
    """See `Model.window_start`. `Model` also describes `watermark` and `num_train_rows`."""
    watermark: str
    num_train_rows: int
    created_at: str


@dataclass(frozen=True, kw_only=True)
class ServedSpan:
    """One interval in which a version of the model was live or a canary."""

    begun: Promotion
    """Journal line with which the version became live or a canary."""
    baked: Promotion | None
    """Journal line that ended the baking of the version. None if the version did not pass its
    baking, or if no controller was running."""
    ended: Promotion | None
    """Journal line that ended the interval. None if the interval has not ended."""
    repository_uri: str
    """URI of Triton's model repository."""

    @property
    def is_live(self) -> bool:
        """Whether the version of this interval is live now."""
        return self.ended is None and self.begun.action != CANARY


@dataclass(frozen=True, kw_only=True)
class ModelCard(Manifest):
    """The model card.

    The fields with defaults are filled by `completed`, from the current registry.
    """

    run: str
    """Run that evaluated the model."""
    model: Model
    raw: RawDataset
    verdict: Verdict
    gate: Mapping[str, float]
    """Limits of the gate by name."""
    slices: list[SliceQuality]
    """Slices. The slice with the worst result comes first."""
    calibration: list[CalibrationBin]
    champion_calibration: list[CalibrationBin]
    """Calibration of the champion on the same rows. Empty if there is no champion."""
    validation: ValidationReport | None
    """Report of validation on the training rows: drift, skew and findings. None if evaluation
    received no report."""
    lineage: list[Ancestor] = field(default_factory=list)
    """Ancestors, beginning with the parent, as far back as the registry has manifests. The list has
    at most `MAX_ANCESTORS` entries."""
    served: list[ServedSpan] = field(default_factory=list)
    """Oldest first."""
    blocked: Promotion | None = None
    """Journal line of the automatic rollback after which the model was blocked. None if the model
    was never rolled back, or if a person has promoted the model since."""
    journal_time: str | None = None
    """Time of the newest line of the promotion journal when the card was read. None if the journal
    was empty."""

    @property
    def model_id(self) -> str:
        """Id of the card's model."""
        return self.model.model_id


def card_path(store: Path, model_id: str) -> Path:
    """Return the path of a model's stored card."""
    return verdict_paths(store, model_id)[0].with_name("card.json")


def read_card(store: Path, reference: str) -> ModelCard:
    """Return the card of a model with its current state.

    Args:
        store: Folder of the model registry.
        reference: Number of a version, or a model's id, as in `referenced_model`.

    Raises:
        ContractError: the version or model does not exist, the model was never evaluated, or a file
            of the registry is corrupt.
    """
    model_id = referenced_model(store, reference).model_id
    path = card_path(store, model_id)
    if not path.exists():
        raise ContractError(
            f"{path} is absent: model {model_id} has no card, expected an evaluated model"
        )
    return completed(store, ModelCard.read(path))


def completed(store: Path, card: ModelCard) -> ModelCard:
    """Return the card, completed by the model's lineage and current state in the registry.

    Raises:
        ContractError: the journal or a manifest is corrupt.
    """
    entries = promotion_journal.read_entries(store)
    return replace(
        card,
        model=replace(card.model, uri=model_folder(store, card.model_id).absolute().as_uri()),
        lineage=list(islice(_ancestors(store, card.model), MAX_ANCESTORS)),
        served=_served_spans(store, card.model_id),
        blocked=promotion_journal.blocked_models(store).get(card.model_id),
        journal_time=entries[-1].time if entries else None,
    )


def _ancestors(store: Path, model: Model) -> Iterator[Ancestor]:
    while (
        model.parent_model_id
        and (path := model_folder(store, model.parent_model_id) / Model.MANIFEST).exists()
    ):
        model = Model.read(path)
        yield Ancestor(
            model_id=model.model_id,
            window_start=model.window_start,
            watermark=model.watermark,
            num_train_rows=model.num_train_rows,
            created_at=model.created_at,
        )


def _served_spans(store: Path, model_id: str) -> list[ServedSpan]:
    """Return the intervals in which the model answered requests.

    A canary has one interval for each share of the traffic.
    """
    lines = promotion_journal.read_effective(store)
    spans = []
    for index, line in enumerate(lines):
        if line.model_id != model_id or line.action not in (CANARY, *LIVE_ACTIONS):
            continue
        ends = (
            LIVE_ACTIONS if line.action in LIVE_ACTIONS else (CANARY, CANARY_ENDED, *LIVE_ACTIONS)
        )
        after = lines[index + 1 :]
        end = next(
            (number for number, later in enumerate(after) if later.action in ends), len(after)
        )
        spans.append(
            ServedSpan(
                begun=line,
                baked=next(
                    (
                        each
                        for each in after[:end]
                        if (each.action, each.version) == (BAKED, line.version)
                    ),
                    None,
                ),
                ended=after[end] if end < len(after) else None,
                repository_uri=Release.read(release_path(store, line.version)).repository_uri,
            )
        )
    return spans
