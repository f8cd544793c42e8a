"""What one validation works on: this run's rows and rules, and the champion that they are compared with."""

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
    """What the champion's folder in the model store says about the rows that its line learned from."""

    folder: Path
    statistics: Any
    """TFDV's, of the window that the champion itself was trained on."""
    windows: KeptWindows
    """Of its whole line."""


def read_champion(folder: Path) -> Champion:
    """The champion whose model lies in `folder`."""
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
    """The rows to judge."""
    folder: Path
    """The step's folder; filled by validation, which replaces that of an earlier try."""
    store: Path
    """The model store, which keeps quarantined rows."""
    rules: ValidationSettings
    champion: Champion | None = None
    parent: Path | None = None
    """Folder of the model that the round continues; None = from scratch."""
    schema_path: Path | None = None
    """The schema in force; None infers it from these rows."""
    served: Objects | None = None
    """Served rows to compare with; None = not compared."""
    summarize: Callable[..., Any] = summarize_files
    """Computes the statistics of files: on this machine, or on a runner of Beam."""
