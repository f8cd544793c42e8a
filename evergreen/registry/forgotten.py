"""Record of models whose training rows were later removed by `evergreen admin forget`.

The record contains no user ids. When the rows are removed, the record is the only evidence that a
model was trained on them. A model that was trained on removed rows must be replaced. The command
that removes rows adds a line to the record before it removes the first row.

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

_FILE = "forgotten.jsonl"


@dataclass(frozen=True, kw_only=True)
class _Forgotten:
    """One removal of a user's rows."""

    time: str
    """ISO 8601 UTC."""
    models: Sequence[str]
    """Ids of the models that were trained on the user's rows, directly or through a parent."""


def keep_forgotten(store: Path, models: Sequence[str], *, now: datetime) -> None:
    """Record that a user's rows are removed, and that `models` were trained on these rows."""
    append_line(
        store / _FILE, json.dumps(asdict(_Forgotten(time=now.isoformat(), models=list(models))))
    )


def removed_at(store: Path, model_id: str) -> str | None:
    """Return the time of the last removal of rows on which the model was trained.

    Removed training rows of the model's ancestors are included. Returns None if no training rows of
    the model or its ancestors were removed.

    Raises:
        ContractError: the record or a model's manifest is corrupt.
    """
    lineage = set(_lineage(store, model_id))
    removals = read_records(store / _FILE, _Forgotten, name="a removal of a user's rows")
    times = [each.time for each in removals if lineage.intersection(each.models)]
    return times[-1] if times else None


def _lineage(store: Path, model_id: str | None) -> Iterator[str]:
    """Yield the ids of a model and its ancestors, as far back as the registry has manifests."""
    while model_id is not None:
        yield model_id
        manifest = model_folder(store, model_id) / Model.MANIFEST
        model_id = Model.read(manifest).parent_model_id if manifest.exists() else None
