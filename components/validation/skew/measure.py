"""Skew of all features: by joined rows, which names the broken feature; by distributions where rows do not join.

The rows that were trained on are compared with the rows that were served in the same span of time. Labels are not
compared: what is served has no label yet. A feature that differs in joined rows differs for certain, whatever its
distribution looks like: what training was given is not what the model was asked about. Distributions tell less: rows
that were served and rows that were logged for training may be of other users.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa

from components.contracts import criteo
from components.validation.skew.archive import Archive, Span, span_of, within
from components.validation.skew.joined import JoinedRows
from components.validation.skew.partitions import PART_ROWS, count_rows, read_rows, split

logger = logging.getLogger(__name__)

ROWS, DISTRIBUTIONS = "rows", "distributions"
DIFFERING_ROWS = "DIFFERING_ROWS"
MIN_JOINED = 100
"""Joined rows from which on they alone speak."""

Distributions = Callable[[Iterator[pa.RecordBatch], Iterator[pa.RecordBatch]], "list[dict[str, Any]]"]
"""(training rows, served rows) -> entries as those of drift."""


@dataclass(frozen=True, kw_only=True)
class Skew:
    """What was found."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    """As `manifests.ValidationReport.skew`; empty where no row of the span was served."""
    facts: dict[str, Any] = field(default_factory=dict)
    """As `manifests.ValidationReport.served`."""


def measure_skew(
    training: Sequence[Path],
    archive: Archive,
    scratch: Path,
    *,
    threshold: float,
    distributions: Distributions,
    excluded: Sequence[str] = (),
    part_rows: int = PART_ROWS,
) -> Skew:
    """Compares the rows of the files `training` with those that `archive` holds of the same span.

    Args:
        training: Parquet files in the raw schema.
        archive: See `archive`.
        scratch: Folder for parts of large windows; nothing stays in it.
        threshold: Share of joined rows that may differ.
        distributions: Compares where fewer than `MIN_JOINED` rows join.
        excluded: Features that nobody learns from; not compared.
        part_rows: See `partitions.PART_ROWS`.

    Raises:
        ContractError: a file on either side lacks a column or holds it in another type.
        TemporaryError, PermanentError: the archive's bucket cannot be read.
    """
    features = [name for name in criteo.FEATURES if name not in excluded]
    span = span_of(training)
    if span is None:
        return Skew(facts=_facts(archive, span, JoinedRows([]), ROWS))
    with archive.files(span, features, scratch) as files:
        if not files:
            return Skew(facts=_facts(archive, span, JoinedRows([]), ROWS))
        joined = _join(training, files, span, features, scratch, part_rows)
        logger.info("joined %d training rows with served ones; %d had none", joined.joined, joined.only_training)
        if joined.joined >= MIN_JOINED:
            entries = [_entry(name, joined, threshold) for name in features]
            return Skew(entries=entries, facts=_facts(archive, span, joined, ROWS))
        facts = _facts(archive, span, joined, DISTRIBUTIONS)
        if not joined.only_served + joined.joined:
            return Skew(facts=facts)
        compared = distributions(read_rows(training, features), within(read_rows(files, features), span))
    return Skew(entries=[{**entry, "method": DISTRIBUTIONS} for entry in compared], facts=facts)


def _join(
    training: Sequence[Path],
    files: Sequence[Path],
    span: Span,
    features: Sequence[str],
    scratch: Path,
    part_rows: int,
) -> JoinedRows:
    joined = JoinedRows(features)
    scratch.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=scratch, prefix=".skew-") as parts:
        sides = [read_rows(training, features), within(read_rows(files, features), span)]
        rows = count_rows(training) + count_rows(files)
        for mine, theirs in split(sides, rows, Path(parts), part_rows=part_rows):
            joined.add(mine, theirs)
    return joined


def _facts(archive: Archive, span: Span | None, joined: JoinedRows, method: str) -> dict[str, Any]:
    return {
        "served_uri": archive.uri,
        "method": method,
        "first_event_time": span.first.isoformat() if span else None,
        "last_event_time": span.last.isoformat() if span else None,
        "num_joined": joined.joined,
        "num_only_training": joined.only_training,
        "num_only_served": joined.only_served,
    }


def _entry(name: str, joined: JoinedRows, threshold: float) -> dict[str, Any]:
    counts, interval = joined.features[name], joined.interval(name)
    assert interval is not None
    share = counts.differing / joined.joined
    return {
        "feature": name,
        "method": ROWS,
        "measure": DIFFERING_ROWS,
        "distance": share,
        "threshold": threshold,
        "severity": "warn" if share > threshold else "info",
        "drifted": share > threshold,
        "num_rows_now": joined.joined,
        "num_rows_before": joined.joined,
        "effect": share,
        "effect_low": interval[0],
        "effect_high": interval[1],
        "differing": counts.differing,
        "only_training": counts.only_training,
        "only_served": counts.only_served,
        "factor": counts.factor(),
        "example": counts.example,
    }
