"""Inputs of one validation: the run's rows and rules, and the champion to compare with."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from components.validation.quarantine_store import rows_folder
from components.validation.rows import parquet_files
from components.validation.schema_versions import read_schema
from components.validation.tfdv_statistics import read_statistics, summarize_files
from components.validation.windows import KeptWindows, read_windows
from evergreen.config.validation import ValidationSettings
from evergreen.contracts.manifests import Model, RawDataset
from evergreen.contracts.words import ShownValues, read_words
from evergreen.storage.objects import Objects
from evergreen.storage.uris import local_path


@dataclass(frozen=True, kw_only=True)
class Champion:
    """Champion with the statistics of its training rows, from its folder in the model registry."""

    folder: Path
    statistics: Any
    """TFDV's statistics of the window that the champion itself was trained on."""
    windows: KeptWindows
    """Statistics of all windows in the champion's lineage."""


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
    """Training rows to check."""
    folder: Path
    """The step's folder. Validation writes its results into this folder, and replaces the results
    of an earlier attempt."""
    store: Path
    """The model registry, which stores quarantined rows."""
    rules: ValidationSettings
    champion: Champion | None = None
    parent: Path | None = None
    """Folder of the model that the run continues. None = the model is trained from scratch."""
    schema_path: Path | None = None
    """Path of the schema in force. If it is None, the schema is inferred from these rows."""
    served: Objects | None = None
    """Served rows that the training rows are compared with. None disables the comparison."""
    summarize: Callable[..., Any] = summarize_files
    """Function that computes the statistics of files, on this machine or on a runner of Beam."""

    @property
    def quarantine(self) -> Path:
        """Folder of the registry for the rows that this run quarantines."""
        return rows_folder(self.store, self.run)

    @cached_property
    def files(self) -> list[Path]:
        """Parquet files of the training rows, sorted by name."""
        return parquet_files(local_path(self.raw.train_uri))

    @cached_property
    def schema(self) -> Any | None:
        """Schema in force, or None."""
        return read_schema(self.schema_path) if self.schema_path else None

    @cached_property
    def shown(self) -> ShownValues:
        """Names of the categories in reports, and the columns that reports hide."""
        words = read_words(local_path(self.raw.words_uri)) if self.raw.words_uri else {}
        return ShownValues(words=words, hidden=self.raw.recommender.columns_of_users)
