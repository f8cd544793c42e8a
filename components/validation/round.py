"""Inputs of one validation: the run's rows and rules, and the champion to compare with."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.validation.tfdv_statistics import read_statistics, summarize_files
from components.validation.windows import KeptWindows, read_windows
from evergreen.config.validation import ValidationSettings
from evergreen.contracts.manifests import Model, RawDataset
from evergreen.storage.objects import Objects


@dataclass(frozen=True, kw_only=True)
class Champion:
    """Statistics of the champion's training rows, from its folder in the model registry."""

    folder: Path
    statistics: Any
    """TFDV's statistics of the window that the champion itself was trained on."""
    windows: KeptWindows
    """Profiles of all windows of its lineage."""


def read_champion(folder: Path) -> Champion:
    """Read the champion whose model is in `folder`."""
    return Champion(
        folder=folder,
        statistics=read_statistics(folder / Model.STATISTICS),
        windows=read_windows(folder / Model.WINDOWS),
    )


@dataclass(frozen=True, kw_only=True)
class Round:
    """One run's inputs."""

    run: str
    raw: RawDataset
    """The rows to check."""
    folder: Path
    """The step's folder. Validation fills it, and replaces the folder of an earlier try."""
    store: Path
    """The model registry, which stores quarantined rows."""
    rules: ValidationSettings
    champion: Champion | None = None
    parent: Path | None = None
    """Folder of the model that the run continues. None = from scratch."""
    schema_path: Path | None = None
    """The schema in force. If it is None, the schema is inferred from these rows."""
    served: Objects | None = None
    """Served rows to compare with. If it is None, nothing is compared."""
    summarize: Callable[..., Any] = summarize_files
    """Function that computes the statistics of files, on this machine or on a runner of Beam."""
