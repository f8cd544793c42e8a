"""Lake files whose rows cannot be read.

A run does not read unfit files, and the report of the run lists the unfit files.

A file is unfit if it is corrupt, lacks a column, has a column of another type, or has too many
malformed rows. A reader of several files reports all unfit files at once, so a person can correct
all files in one attempt.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from evergreen.rows.archived_rows import open_parquet, reading_parquet
from evergreen.runtime.errors import ContractError

T = TypeVar("T")
NUM_NAMED = 5
"""Maximum number of unfit files that an error message lists."""


class UnfitFiles(ContractError):
    """Error about files whose rows cannot be read, with the reason for each."""

    def __init__(self, reasons: Mapping[Path, str]) -> None:
        first = next(iter(reasons.values()))
        super().__init__(
            f"{first}; {len(reasons) - 1} more files are unfit" if len(reasons) > 1 else first
        )
        self.reasons = dict(reasons)
        """Reason why each file is unfit, by path."""


class QuarantinedFile(NamedTuple):
    """A file that a run left out."""

    file: str
    """Name relative to the lake."""
    num_rows: int | None
    """Number of rows according to the file's footer. None if the file has no readable footer."""
    reason: str

    @classmethod
    def of(cls, path: Path, name: str, reason: str) -> "QuarantinedFile":
        """Return the entry for the file at `path`. `name` is the file's name in the lake."""
        try:
            with reading_parquet(path):
                num_rows = open_parquet(path).metadata.num_rows
        except (ContractError, OSError):
            num_rows = None
        return cls(name, num_rows, reason)


def expect_few(
    unfit: Sequence[QuarantinedFile], num_fit: int, *, what: str, max_fraction: float
) -> None:
    """Check that the share of unfit files is not too large.

    Args:
        unfit: Files that are unfit to read.
        num_fit: Number of files that are fit to read.
        what: Kind of the files, for the error message.
        max_fraction: Maximum share of unfit files, in [0, 1].

    Raises:
        ContractError: the share of unfit files is above the maximum. The message names the first
            unfit files.
    """
    num_files = len(unfit) + num_fit
    if len(unfit) > max_fraction * num_files:
        raise ContractError(
            f"{len(unfit)} of {num_files} files {what} are unfit to read "
            f"({len(unfit) / num_files:.2%}), expected at "
            f"most {max_fraction:.2%} (extraction.max_quarantined_file_fraction); the first: "
            f"{unfit[0].reason}; fix or "
            "remove them, or allow more"
        )


def read_each(paths: Iterable[Path], read: Callable[[Path], T]) -> list[T]:
    """Return the results of `read` for each file, in order.

    Raises:
        UnfitFiles: `read` raised a `ContractError` for at least one file. The error names all unfit
            files.
    """
    found: list[T] = []
    unfit: dict[Path, str] = {}
    for path in paths:
        try:
            found.append(read(path))
        except ContractError as error:
            unfit[path] = str(error)
    if unfit:
        raise UnfitFiles(unfit)
    return found
