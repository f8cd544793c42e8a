"""Which rows a run trains on: the asked-for window, or from the champion's last trained row on.

The watermark is the champion's: a round that failed, or that validation or the gate refused, leaves no champion behind,
so the next one reads its rows again, with its own. Rows that come to the lake behind the watermark are `seen_files`'.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from components.contracts.manifests import Model
from components.extraction.maturity import ALL_FINAL, Maturity
from components.extraction.times import DAY_MICROS, Span, parse_time, to_iso
from components.runtime.errors import ContractError
from components.storage.uris import local_path
from components.store import models as model_store


def resolve_window(
    *,
    start: str,
    end: str,
    accepted: Model | None,
    days: float = 0.0,
    maturity: Maturity = ALL_FINAL,
    newest: Callable[[], int | None] = lambda: None,
) -> Span:
    """The window [start, end).

    Where younger rows are left for the next round, the window ends `maturity.attribution` before its end as asked for,
    or before the end of the lake: a row's age counts from there, not from this machine's clock, so a try that is
    repeated later reads the same.

    Args:
        start: ISO 8601, inclusive; empty = after the last row of `accepted`, or from the first row without one.
        end: ISO 8601, exclusive; empty = to the last row.
        accepted: The champion's model; looked at only where neither `start` nor `days` says.
        days: Length of the window, counted back from its end; 0 = `start` says.
        maturity: When a row's label is final.
        newest: Time of the newest row, microseconds since the epoch, None where there is none. Asked only where the
            window depends on it, since it may cost a transfer.

    Raises:
        ContractError: a time is not ISO 8601, `days` contradicts `start` or is no length of time, or the window is
            empty by its bounds.
    """
    if not (math.isfinite(days) and days >= 0):
        raise ContractError(f"window_days is {days}, expected 0 (window_start says) or more")
    if days and start:
        raise ContractError(f"window_days is {days} with window_start {start!r}, expected one of the two")
    asked = last = parse_time("window_end", end) if end else None
    if asked is None and (days or maturity.attribution):
        last = newest()
        asked = last = None if last is None else last + 1
    if last is not None and maturity.leaves:
        last -= maturity.attribution
    first = parse_time("window_start", start) if start else None
    if days:
        first = None if last is None else last - round(days * DAY_MICROS)
    elif not start and accepted:
        first = watermark(accepted) + 1
    window = Span(first, last)
    if window.is_empty and asked != last:
        raise ContractError(
            f"window {window} holds no mature row: of rows up to {to_iso(asked or 0)} those of the last "
            f"{maturity.attribution_hours:g} hours (attribution_hours) are left for the next round"
        )
    if window.is_empty:
        raise ContractError(f"window {window} is empty, expected its start before its end")
    return window


def accepted_model(store: Path, champion: str) -> Model | None:
    """The model behind the champion (`current`, `none` or a released model's id); None where there is none.

    Raises:
        ContractError: the champion is unknown, or its manifest is damaged.
    """
    release = model_store.champion(store, champion)
    return Model.read(local_path(release.model_uri) / Model.MANIFEST) if release else None


def watermark(model: Model) -> int:
    """Time of the newest row that was read for the model, microseconds since the epoch.

    Raises:
        ContractError: the manifest holds no time.
    """
    return parse_time(f"last_event_time of model {model.model_id}", model.last_event_time)
