"""A model's card: what is known of one model, from the rows that it learned to where it served.

Joins evaluation, which writes it when it judges, and deployment, which writes it again at the release, to people. The
card holds the manifests themselves, so its numbers are theirs. Like them it names no value of a column of users. What
the promotion journal tells is read anew whenever a card is read, so a card that somebody asks for is never behind it.

Layout: `<store>/verdicts/<model_id>/card.json`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from evergreen.contracts.manifests import Manifest, Model, RawDataset, Release, RowsQuality, ValidationReport, Verdict
from evergreen.registry import promotion_journal
from evergreen.registry.models import model_folder, referenced_model, release_path, verdict_paths
from evergreen.registry.promotion_journal import BAKED, CANARY, CANARY_ENDED, LIVE_ACTIONS, Promotion
from evergreen.runtime.errors import ContractError

MAX_ANCESTORS = 50
"""Models of a line that a card names; an hourly line has thousands."""


@dataclass(frozen=True, kw_only=True)
class SliceQuality(RowsQuality):
    """Both models on one slice of the held-out rows; a number that does not exist is None."""

    name: str
    click_rate: float | None
    p_value: float | None
    """One-sided, of the slice losing no more than is allowed; None where it was not tested."""

    @property
    def log_loss_change(self) -> float | None:
        """The candidate's log loss over the champion's, less 1."""
        now, before = self.candidate.log_loss, self.champion and self.champion.log_loss
        return now / before - 1 if now is not None and before else None


@dataclass(frozen=True, kw_only=True)
class CalibrationBin:
    """One equal share of the held-out rows, cut by score."""

    num_rows: int
    mean_score: float
    click_rate: float


@dataclass(frozen=True, kw_only=True)
class Ancestor:
    """A model whose line this one continues."""

    model_id: str
    window_start: str | None
    """See `Model.window_start`, likewise the next two."""
    last_learned_time: str
    num_train_rows: int
    created_at: str


@dataclass(frozen=True, kw_only=True)
class ServedSpan:
    """One time in which a version of the model was live or a canary, as lines of the promotion journal."""

    begun: Promotion
    """It made the version live, or the canary that answers its share."""
    baked: Promotion | None
    """None = the version was not found good after its release, or no controller watched it."""
    ended: Promotion | None
    """None = it still is."""
    repository_uri: str
    """Triton's model repository."""

    @property
    def is_live(self) -> bool:
        """Whether this version is the live one now."""
        return self.ended is None and self.begun.action != CANARY


@dataclass(frozen=True, kw_only=True)
class ModelCard(Manifest):
    """The card; the fields with defaults are what the store tells of the model beside its own round (`completed`)."""

    run: str
    """The run that judged it."""
    model: Model
    raw: RawDataset
    verdict: Verdict
    gate: Mapping[str, float]
    """The gate's thresholds by name: its settings, and the requests that an interval needs of each class."""
    slices: list[SliceQuality]
    """Those that speak most against the model first."""
    calibration: list[CalibrationBin]
    champion_calibration: list[CalibrationBin]
    """On the same rows; empty without a champion."""
    validation: ValidationReport | None
    """Drift, skew and findings in the training rows; None where evaluation was not given the report."""
    lineage: list[Ancestor] = field(default_factory=list)
    """From the parent back, as far as the store has them, at most `MAX_ANCESTORS`."""
    served: list[ServedSpan] = field(default_factory=list)
    """Oldest first."""
    blocked: Promotion | None = None
    """The line by which the model was taken back by itself; None = it was not, or a person promoted it since."""
    journal_time: str | None = None
    """Time of the newest line of the promotion journal that the card knows; None = there was none."""

    @property
    def model_id(self) -> str:
        """Of the model that the card is about."""
        return self.model.model_id


def card_path(store: Path, model_id: str) -> Path:
    """Where the card of a model lies as the gate, or the release, wrote it."""
    return verdict_paths(store, model_id)[0].with_name("card.json")


def read_card(store: Path, reference: str) -> ModelCard:
    """The card of a model as of now; `reference` as in `referenced_model`.

    Raises:
        ContractError: there is no such version or model, it was never judged, or a file of the store is corrupt.
    """
    model_id = referenced_model(store, reference).model_id
    path = card_path(store, model_id)
    if not path.exists():
        raise ContractError(f"{path} is absent: model {model_id} has no card, expected a model that evaluation judged")
    return completed(store, ModelCard.read(path))


def completed(store: Path, card: ModelCard) -> ModelCard:
    """The card with the model's line, and with all that came after the gate, as the store has it now.

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
    while model.parent_model_id and (path := model_folder(store, model.parent_model_id) / Model.MANIFEST).exists():
        model = Model.read(path)
        yield Ancestor(
            model_id=model.model_id,
            window_start=model.window_start,
            last_learned_time=model.last_learned_time,
            num_train_rows=model.num_train_rows,
            created_at=model.created_at,
        )


def _served_spans(store: Path, model_id: str) -> list[ServedSpan]:
    """Times in which the model answered; a canary whose share grew has one for each share."""
    lines = promotion_journal.read_standing(store)
    spans = []
    for place, line in enumerate(lines):
        if line.model_id != model_id or line.action not in (CANARY, *LIVE_ACTIONS):
            continue
        ends = LIVE_ACTIONS if line.action in LIVE_ACTIONS else (CANARY, CANARY_ENDED, *LIVE_ACTIONS)
        after = lines[place + 1 :]
        end = next((number for number, later in enumerate(after) if later.action in ends), len(after))
        spans.append(
            ServedSpan(
                begun=line,
                baked=next(
                    (each for each in after[:end] if (each.action, each.version) == (BAKED, line.version)), None
                ),
                ended=after[end] if end < len(after) else None,
                repository_uri=Release.read(release_path(store, line.version)).repository_uri,
            )
        )
    return spans
