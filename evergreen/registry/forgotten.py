"""Which models still contain users whose rows were removed, kept without a word of who the users were.

Joins `evergreen forget`, which removes the rows, to whoever asks which model is still to be replaced. Once rows are
removed, nothing but this record shows that a model learned from them. A line is written before the first row goes.

Layout: `<store>/forgotten.jsonl`.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from evergreen.contracts.manifests import Model
from evergreen.registry.models import model_folder
from evergreen.runtime.durable import append_line, read_records

FILE = "forgotten.jsonl"


@dataclass(frozen=True, kw_only=True)
class Forgotten:
    """One removal of a user's rows."""

    time: str
    """ISO 8601 UTC."""
    models: Sequence[str]
    """Models that learned from the user, by themselves or through a parent."""


def keep_forgotten(store: Path, models: Sequence[str], *, now: datetime) -> None:
    """Record that rows of a user that these models learned from are removed."""
    append_line(store / FILE, json.dumps(asdict(Forgotten(time=now.isoformat(), models=list(models)))))


def removed_at(store: Path, model_id: str) -> str | None:
    """Return when rows that a model, or one that it continues, learned from were last removed; None if none were.

    Raises:
        ContractError: The record or a model's manifest is corrupt.
    """
    lineage = set(_lineage(store, model_id))
    times = [each.time for each in read_records(store / FILE, Forgotten, name="a removal of a user's rows")
             if lineage.intersection(each.models)]  # fmt: skip
    return times[-1] if times else None


def _lineage(store: Path, model_id: str | None) -> Iterator[str]:
    """The model and those that it continues, as far back as the store knows them."""
    while model_id is not None:
        yield model_id
        manifest = model_folder(store, model_id) / Model.MANIFEST
        model_id = Model.read(manifest).parent_model_id if manifest.exists() else None
