"""Collect what is exported: evaluated models, released versions, and the live version.

The clients of the registries (`mlflow_server`, `kubeflow`) do not read the store's files
themselves.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from evergreen.contracts.manifests import Release
from evergreen.registry import promotion_journal
from evergreen.registry.model_cards import ModelCard, card_path
from evergreen.registry.models import read_release
from evergreen.registry.promotion_journal import BAKED, moment_of
from evergreen.storage.uris import local_path


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Content of one model registry, in the form that other registries need."""

    name: str
    """Name of the recommender."""
    cards: list[ModelCard]
    """Cards of the models that the gate evaluated, oldest first."""
    versions: list[tuple[Release, ModelCard]]
    """Versions that served traffic, live or as a canary, with the cards of their models. The
    versions are in ascending order. Versions without a graph in the store are left out."""
    aliases: dict[str, int | None]
    """Version numbers from the promotion journal by alias: `champion` is the live version, and
    `candidate` the canary. A number is None if there is no such version."""


def read_exported(store: Path) -> Exported | None:
    """Return the models and versions of a registry, or None if no model has been evaluated yet.

    Raises:
        ContractError: the journal or a manifest is corrupt.
    """
    cards = [
        ModelCard.read(path)
        for path in sorted((store / "verdicts").glob(f"*/{card_path(store, '').name}"))
    ]
    if not cards:
        return None
    cards.sort(key=lambda card: moment_of(card.model.created_at))
    card_of = {card.model_id: card for card in cards}
    lines = [line for line in promotion_journal.read_effective(store) if line.action != BAKED]
    releases = [read_release(store, number) for number in sorted({line.version for line in lines})]
    releases = [
        each
        for each in releases
        if each.model_id in card_of and local_path(each.graph_uri).exists()
    ]
    live, canary = promotion_journal.current(store), promotion_journal.canary_at_work(store)
    return Exported(
        name=cards[-1].model.recommender.name,
        cards=cards,
        versions=[(each, card_of[each.model_id]) for each in releases],
        aliases={
            "champion": live.version if live else None,
            "candidate": canary.version if canary else None,
        },
    )


def parameters_of(card: ModelCard) -> dict[str, str]:
    """Return the parameters of the run that trained a model.

    The parameters are the network, the recommender's settings, the gate's thresholds, and the
    training data.
    """
    model = card.model
    named = model.recommender.named_settings | {
        f"model.{name}": value for name, value in model.config.items()
    }
    named |= {f"gate.{name}": value for name, value in card.gate.items()}
    named |= {"engine": model.backend, "seed": model.seed, "parent_model_id": model.parent_model_id}
    named |= {"window_start": model.window_start, "watermark": model.watermark}
    return {name: str(value) for name, value in named.items() if value is not None}


def metrics_of(card: ModelCard) -> dict[str, float]:
    """Return the metrics of a model on its held-out rows. Undefined metrics are omitted."""
    verdict = card.verdict
    groups = {"": verdict.candidate, "champion_": verdict.champion, "lead_": verdict.difference}
    found = {
        f"{prefix}{name}": v
        for prefix, part in groups.items()
        if part
        for name, v in asdict(part).items()
    }
    found |= {f"progressive_{name}": value for name, value in card.model.progressive.items()}
    found |= {"train_rows": card.model.num_train_rows, "holdout_rows": verdict.num_rows}
    found |= {"holdout_clicks": verdict.num_clicks, "optimizer_step": card.model.optimizer_step}
    return {name: float(value) for name, value in found.items() if value is not None}


def tags_of(card: ModelCard) -> dict[str, str]:
    """Return the gate's decision, and the ids of the model, its data and its recommender."""
    verdict, model = card.verdict, card.model
    found = {
        "model_id": card.model_id,
        "verdict": verdict.decision,
        "accepted": str(verdict.accepted).lower(),
    }
    return {
        **found,
        "data_sha256": model.raw_digest,
        "recommender_sha256": model.recommender.digest,
    }
