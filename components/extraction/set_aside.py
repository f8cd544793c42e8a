"""Malformed rows: counted and kept beside their reason, and the point where there are too many.

A reader adds what it cannot use and says how many rows it has seen; nothing is dropped without a line in the JSONL
file: `file`, `line` (from 1; the row's number in a Parquet file), `reason`, `text` (the original).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from components.extraction.foreign_columns import ForeignColumn
from components.runtime.errors import ContractError

logger = logging.getLogger(__name__)

DEFAULT_MAX_MALFORMED_FRACTION = 0.01
"""Share of a file's rows that may be malformed. Criteo's own files have none; 1 % lets a torn line or a
concatenation scar pass, and stops at a file whose columns have moved."""
JUDGED_FROM_ROWS = 10_000
"""A file is judged while it is read once it has shown this many rows, so garbage stops early; and always at its end."""
NUM_EXAMPLES = 3
Named = Callable[[Path], str]
"""What people call a file."""


@dataclass
class _Tally:
    num_rows: int = 0
    num_malformed: int = 0
    examples: list[str] = field(default_factory=list)


class SetAside:
    """Collects malformed rows into the JSONL file at `path`, which exists only if there is one.

    Args:
        path: Where the rows go; in a folder that is published as a whole, or discarded.
        max_fraction: Share of each file's rows that may be malformed, in [0, 1].
        named: What a file is called in the JSONL file: its path, or where it was copied from.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_fraction: float = DEFAULT_MAX_MALFORMED_FRACTION,
        named: Named = str,
    ) -> None:
        if not 0 <= max_fraction <= 1:
            raise ContractError(f"max_malformed_fraction is {max_fraction}, expected 0 to 1")
        self.path = path
        self.num_rows = 0
        """Rows set aside so far, over all files."""
        self._max_fraction, self._named = max_fraction, named
        self._tallies: dict[Path, _Tally] = {}
        self._foreign: dict[str, ForeignColumn] = {}
        self._file: IO[str] | None = None

    def __enter__(self) -> SetAside:
        """Itself; the file is closed on the way out."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def add(self, path: Path, line: int, reason: str, text: str) -> None:
        """Sets one row aside; it still has to be counted by `saw`."""
        if self._file is None:
            self._file = self.path.open("w", encoding="utf-8")
        self._file.write(json.dumps({"file": self._named(path), "line": line, "reason": reason, "text": text}) + "\n")
        self.num_rows += 1
        tally = self._tallies.setdefault(path, _Tally())
        tally.num_malformed += 1
        if len(tally.examples) < NUM_EXAMPLES:
            tally.examples.append(f"line {line}: {reason}")

    def met(self, columns: Iterable[ForeignColumn]) -> None:
        """Keeps foreign columns of a file, the first of each name."""
        for each in columns:
            self._foreign.setdefault(each.column, each)

    @property
    def foreign_columns(self) -> list[dict[str, Any]]:
        """See `RawDataset.foreign_columns`."""
        return [each._replace(file=self._named(Path(each.file)))._asdict() for each in self._foreign.values()]

    def saw(self, path: Path, num_rows: int) -> None:
        """Counts rows of `path`, sound and malformed alike, and judges the file if it has shown enough of them.

        Raises:
            ContractError: too many of the file's rows so far are malformed.
        """
        tally = self._tallies.setdefault(path, _Tally())
        tally.num_rows += num_rows
        if tally.num_rows >= JUDGED_FROM_ROWS:
            self._judge(path, tally)

    def judge(self) -> None:
        """Judges every file read.

        Raises:
            ContractError: too many of a file's rows are malformed; names the file, the counts and the first examples.
        """
        for path, tally in self._tallies.items():
            self._judge(path, tally)
            if tally.num_malformed:
                logger.warning("%s: %d of %d rows set aside", path, tally.num_malformed, tally.num_rows)

    def _judge(self, path: Path, tally: _Tally) -> None:
        if tally.num_malformed > self._max_fraction * tally.num_rows:
            share = tally.num_malformed / max(tally.num_rows, 1)
            raise ContractError(
                f"{path}: {tally.num_malformed} of {tally.num_rows} rows are malformed ({share:.2%}), expected at most "
                f"{self._max_fraction:.2%}; first: {'; '.join(tally.examples)}"
            )


class Unkept(SetAside):
    """Keeps nothing and judges nothing: for rows that an earlier reader of the file has judged."""

    def __init__(self) -> None:
        super().__init__(Path(), max_fraction=1.0)

    def add(self, path: Path, line: int, reason: str, text: str) -> None:
        """Forgets the row."""

    def saw(self, path: Path, num_rows: int) -> None:
        """Counts nothing."""
