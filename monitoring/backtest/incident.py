"""An incident: a span of records with what was decided over it, so that it replays to the same decisions anywhere.

A folder: `records/day=*/part.parquet` (served rows, with as many before the span as fill the windows),
`statistics/<version>/` (what each model was trained on), `decisions.jsonl` (the lines that the monitor wrote) and
`incident.json` (settings of judging, the judge's memory at the start, models by hash, SHA-256 of every other file).
Writing it is left to `monitoring.backtest.recording`, judging to `monitoring.backtest.judging`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.contracts.reference_statistics import ReferenceStatistics, read_reference
from components.runtime.durable import sha256_file
from components.runtime.errors import ContractError
from components.storage.folder import FolderObjects
from monitoring.backtest.archived_requests import read_requests
from monitoring.backtest.judging import judge_requests
from monitoring.backtest.settings import JudgingSettings
from monitoring.deciding.policy import Baseline
from monitoring.flags import make_settings

FORMAT_VERSION = 1
MANIFEST, RECORDS, STATISTICS, DECISIONS = "incident.json", "records", "statistics", "decisions.jsonl"
REFERENCE, SCORES = "reference.json", "scores.json"


@dataclass(frozen=True, kw_only=True)
class Incident:
    """What `incident.json` says."""

    folder: Path
    start: float
    """Decision points after this time are replayed, seconds since the epoch."""
    end: float
    """And up to this one."""
    settings: JudgingSettings
    memory: Mapping[str, Any] | None
    """The judge's at `start`; None = it had judged nothing."""
    baselines: Mapping[str, Any]
    """What the gate had measured, by version."""
    models: Mapping[str, Any]
    """By version: model id, and the hashes of its release."""


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What came of a replay."""

    lines: tuple[str, ...]
    """One per decision point, as `deciding.policy.DecisionPoint` writes them."""
    recorded: tuple[str, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of the lines."""
        return digest_of(self.lines)

    @property
    def first_difference(self) -> int | None:
        """Index of the first line that is not the recorded one; None where all are."""
        if self.lines == self.recorded:
            return None
        shorter = min(len(self.lines), len(self.recorded))
        return next((n for n in range(shorter) if self.lines[n] != self.recorded[n]), shorter)


def digest_of(lines: Sequence[str]) -> str:
    """SHA-256 of lines, each with its newline."""
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


def read_incident(folder: Path) -> Incident:
    """The incident in `folder`, every file of which is the one that was recorded.

    Raises:
        ContractError: it is none, of a newer format, or a file is missing or changed; names it.
    """
    path = folder / MANIFEST
    try:
        known = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ContractError(f"{path} cannot be read: {error}; expected the folder of a recorded incident") from error
    if known.get("format_version") != FORMAT_VERSION:
        raise ContractError(f"{path} has format version {known.get('format_version')}, expected {FORMAT_VERSION}")
    for name, expected in known["sha256"].items():
        file = folder / name
        if not file.is_file() or sha256_file(file) != expected:
            raise ContractError(f"{file} is missing or is not the file that was recorded, expected sha256 {expected}")
    try:
        settings = make_settings(JudgingSettings, **known["settings"])
    except (TypeError, ContractError) as error:
        raise ContractError(f"{path} holds settings of another version: {error}") from error
    return Incident(
        folder=folder,
        start=known["start"],
        end=known["end"],
        settings=settings,
        memory=known["memory"],
        baselines=known["baselines"],
        models=known["models"],
    )


def replay(incident: Incident) -> Replayed:
    """Judges the incident's records again; the only clock is the records' event time."""

    def baseline(version: int) -> Baseline | None:
        known = incident.baselines.get(str(version))
        return Baseline(**known) if known else None

    def reference(version: int) -> ReferenceStatistics | None:
        folder = incident.folder / STATISTICS / str(version)
        return read_reference(folder / REFERENCE, scores=folder / SCORES) if (folder / REFERENCE).exists() else None

    judgements = judge_requests(
        read_requests(FolderObjects(incident.folder / RECORDS), features=(incident.folder / STATISTICS).exists()),
        incident.settings,
        baseline=baseline,
        reference=reference,
        memory=incident.memory,
    )
    lines = tuple(each.line() for each in judgements if incident.start < each.time <= incident.end)
    return Replayed(lines=lines, recorded=tuple((incident.folder / DECISIONS).read_text().splitlines()))
