"""Which rows a run trains on: the asked-for window, or from the champion's last trained row on."""

from __future__ import annotations

from pathlib import Path

from components.contracts import model_store
from components.contracts.errors import ContractError
from components.contracts.manifests import Model
from components.contracts.uris import local_path
from components.extraction.times import Span, parse_time


def resolve_window(*, start: str, end: str, store: Path, champion: str) -> Span:
    """The window [start, end).

    Args:
        start: ISO 8601, inclusive; empty = after the champion's last trained row, or from the first row without a
            champion.
        end: ISO 8601, exclusive; empty = to the last row.
        store: The model store.
        champion: `current`, `none` or a released model's id.

    Raises:
        ContractError: a time is not ISO 8601, the window is empty by its bounds, or the champion is unknown.
    """
    first = parse_time("window_start", start) if start else _after_champion(store, champion)
    last = parse_time("window_end", end) if end else None
    window = Span(first, last)
    if window.is_empty:
        raise ContractError(f"window {window} is empty, expected its start before its end")
    return window


def _after_champion(store: Path, champion: str) -> int | None:
    release = model_store.champion(store, champion)
    if release is None:
        return None
    model = Model.read(local_path(release.model_uri) / Model.MANIFEST)
    return parse_time(f"last_event_time of model {model.model_id}", model.last_event_time) + 1
