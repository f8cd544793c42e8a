"""What the models of a store saw: their own rounds' days, and those of the models that they continued.

A model that goes on training from a parent keeps what the parent learnt; so the rows of a day that has been
back-filled since are in every model down its line, until one starts from scratch.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from components.contracts.criteo import DAY_PARTITION
from components.contracts.manifests import Model
from components.contracts.retrain_request import CURRENT
from components.extraction.times import parse_day
from components.extraction.versions import newest_complete
from components.runtime.errors import ContractError
from components.storage.locations import open_objects
from components.storage.uris import is_bucket_uri, local_path
from components.store import promotion_journal

_PARTITION = DAY_PARTITION.format(day="")


@dataclass(frozen=True, kw_only=True)
class Descent:
    """A model's line of descent."""

    models: list[Model]
    """The model, its parent, the parent's parent ..., as far as the store has them."""
    is_live: bool
    lost: str | None
    """The ancestor after the last of `models` that is not in the store any more; None = the line is whole."""

    def document(self, day: date | None, versions: dict[str, int] | None) -> dict[str, Any]:
        """What it saw, as JSON holds it.

        Args:
            day: The only one to tell of; None = all.
            versions: Newest version of each day of the lake; None = not asked.

        Returns:
            model_id, parent_model_id, is_live; `days`, of the model's own round first, each: day, version, num_rows,
            num_late_rows of these, replay, the model_id that saw it, and where the lake was asked its lake_version
            (None: the lake has no such day) and whether the rows are outdated; `unknown`: ids in the line whose days
            nobody noted.
        """
        days = [self._seen(model, entry, versions) for model in self.models for entry in model.days]
        unknown = [model.model_id for model in self.models if not model.days] + ([self.lost] if self.lost else [])
        return {
            "model_id": self.models[0].model_id,
            "parent_model_id": self.models[0].parent_model_id,
            "is_live": self.is_live,
            "days": [seen for seen in days if day is None or seen["day"] == str(day)],
            "unknown": unknown,
        }

    @staticmethod
    def _seen(model: Model, entry: dict[str, Any], versions: dict[str, int] | None) -> dict[str, Any]:
        seen = {name: entry[name] for name in ("day", "version", "num_rows")}
        seen |= {"num_late_rows": entry.get("num_late_rows", 0)}
        seen |= {"replay": entry.get("replay", False), "model_id": model.model_id}
        if versions is not None:
            newest = versions.get(entry["day"])
            seen |= {"lake_version": newest, "outdated": newest is not None and newest > entry["version"]}
        return seen


def descents(store: Path, *, model: str | None = None) -> list[Descent]:
    """The lines of all models of the store, oldest first, or of one.

    Args:
        store: The model store.
        model: A model's id, or `current`; None = all.

    Raises:
        ContractError: no such model, nothing is live, or a manifest is damaged.
    """
    if not store.is_dir():
        raise ContractError(f"model store {store} does not exist, expected a folder")
    manifests = sorted((store / "models").glob(f"[!.]*/{Model.MANIFEST}"))
    models = {each.model_id: each for each in map(Model.read, manifests)}
    live = promotion_journal.current(store)
    live_id = live.model_id if live else None
    wanted = list(models)
    if model is not None:
        wanted = [live_id if model == CURRENT else model]  # type: ignore[list-item]
        if wanted[0] not in models:
            raise ContractError(f"model {model!r} is not in the model store {store}, expected one of {list(models)}")
    return [_descent(model_id, models, is_live=model_id == live_id) for model_id in wanted]


def lake_versions(lake: str) -> dict[str, int]:
    """The newest complete version of each day of a lake, by the names of its objects.

    Raises:
        ContractError: the lake is no folder, or a partition's name holds no date.
        TemporaryError, PermanentError: the bucket cannot be listed.
    """
    if is_bucket_uri(lake):
        names = [info.name for info in open_objects(lake).list(_PARTITION)]
    else:
        folder = local_path(lake)
        if not folder.is_dir():
            raise ContractError(f"lake {folder} does not exist, expected a folder of day partitions")
        names = [path.relative_to(folder).as_posix() for path in folder.glob(f"{_PARTITION}*/**/*")]
    days: dict[str, list[str]] = {}
    for name in names:
        day, _, inside = name.removeprefix(_PARTITION).partition("/")
        days.setdefault(str(parse_day(f"lake partition {lake}/{_PARTITION}{day}", day)), []).append(inside)
    return {day: newest_complete(inside) for day, inside in days.items()}


def _descent(model_id: str, models: dict[str, Model], *, is_live: bool) -> Descent:
    line, parent = [models[model_id]], models[model_id].parent_model_id
    while parent in models and models[parent] not in line:
        line.append(models[parent])
        parent = models[parent].parent_model_id
    return Descent(models=line, is_live=is_live, lost=parent)
