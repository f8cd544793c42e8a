"""What is measured of one run's rows: statistics, drift, change of the click rate, skew. Judging is the rules'."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.contracts.manifests import RawDataset
from components.validation.champion_windows import read_champion
from components.validation.drift import measure_drift
from components.validation.kept_windows import KeptWindows
from components.validation.label_shift import measure_label_shift
from components.validation.reference import ReferenceCounter
from components.validation.requests import request_columns
from components.validation.rows import COLUMNS, ColumnFault
from components.validation.rules import Judging
from components.validation.skew.archive import Archive
from components.validation.skew.distributions import comparison
from components.validation.skew.measure import Skew, measure_skew
from components.validation.summarize import num_rows, summarize_files
from components.validation.tfdv_drift import tfdv_distances
from components.validation.windows import WindowSummary

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run's rows in numbers."""

    now: Any
    """TFDV's statistics."""
    counter: ReferenceCounter
    """What the monitor and the next round will need."""
    window: WindowSummary
    line: KeptWindows
    """The windows that the champion's line learnt from."""
    drift: list[dict[str, Any]]
    """Per feature; empty without a champion."""
    label: dict[str, Any] | None
    """Change of the click rate; None without a champion, or where a column is faulty."""
    skew: Skew
    """Against served rows; empty where none were named."""


def measure(
    dataset: RawDataset,
    files: Sequence[Path],
    faults: Sequence[ColumnFault],
    scratch: Path,
    *,
    before: Any | None,
    champion: Path | None,
    served: Archive | None,
    judging: Judging,
    summarize: Callable[..., Any] = summarize_files,
) -> Measured:
    """Measures the rows of `files`; faulty columns are passed over.

    Args:
        dataset: What the rows belong to.
        files: The rows to learn from, in order.
        faults: Of their columns.
        scratch: Folder for intermediate files.
        before: TFDV's statistics of the champion's rows; None without one.
        champion: Its folder.
        served: Archive of served rows; None = not compared.
        judging: Thresholds.
        summarize: Gives the statistics of files, as `summarize_files` or a runner of Beam does.

    Raises:
        ContractError: a file is damaged.
        TemporaryError, PermanentError: the bucket of the served rows cannot be read.
    """
    excluded = frozenset(dataset.excluded_columns)
    now, counter = _summarize(files, faults, excluded, summarize)
    window = counter.window_of(dataset)
    compared, line = read_champion(champion) if champion is not None else (None, KeptWindows(()))
    drift, label = [], None
    if compared is not None and before is not None and window.rows:
        drift = measure_drift(window, compared, judging.settings, distances=tfdv_distances(now, before, excluded))
        label = None if faults else measure_label_shift(window, compared)
    skew = Skew() if served is None or faults else _measure_skew(files, served, scratch, judging, sorted(excluded))
    return Measured(now=now, counter=counter, window=window, line=line, drift=drift, label=label, skew=skew)


def _summarize(
    files: Sequence[Path], faults: Sequence[ColumnFault], excluded: frozenset[str], summarize: Callable[..., Any]
) -> tuple[Any, ReferenceCounter]:
    """TFDV's statistics of the rows, and what the monitor and the next round need; both without faulty columns."""
    faulty = {fault.column for fault in faults}
    columns = [column for column in COLUMNS if column not in faulty]
    counter = ReferenceCounter(excluded=sorted(excluded | faulty))
    now = summarize(files, [*columns, *request_columns(files)], [counter])
    held = counter.held_bytes / 1e6
    logger.info("statistics of %d rows in %d files; counted categories take %.1f MB", num_rows(now), len(files), held)
    return now, counter


def _measure_skew(
    files: Sequence[Path], served: Archive, scratch: Path, judging: Judging, excluded: Sequence[str]
) -> Skew:
    settings = judging.settings
    return measure_skew(
        files,
        served,
        scratch,
        threshold=settings.skew_share,
        distributions=comparison(settings, excluded),
        excluded=excluded,
    )
