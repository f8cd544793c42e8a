"""Training rows beside served rows by their distributions, with the tests of drift; for rows that cannot be joined."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from components.validation.drift import measure_drift
from components.validation.kept_windows import KeptWindows
from components.validation.reference import ReferenceCounter
from components.validation.settings import ValidationSettings
from components.validation.windows import WindowSummary

Batches = Iterator[pa.RecordBatch]


def comparison(settings: ValidationSettings, excluded: Sequence[str]) -> Callable[[Batches, Batches], Any]:
    """What `measure.measure_skew` takes as `distributions`: entries of drift from served (before) to training (now)."""

    def compare(training: Batches, served: Batches) -> list[dict[str, Any]]:
        now, before = (_window(side, excluded) for side in (training, served))
        return measure_drift(now, KeptWindows((before,)), settings) if now.rows and before.rows else []

    return compare


def _window(batches: Batches, excluded: Sequence[str]) -> WindowSummary:
    counter = ReferenceCounter(excluded=excluded)
    for batch in batches:
        counter.add(batch)
    return counter.window()
