"""Malformed rows: kept beside their reason, counted, and the step stopped if a file has too many.

A reader adds each row that it cannot use and counts all rows that it has read. Each malformed row is a line in a JSONL
file: `file`, `line` (from 1; the row's number in a Parquet file), `reason`, `text` (the original).
"""

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from components.extraction.columns import SchemaMismatch
from components.extraction.settings import ExtractionSettings
from components.extraction.times import TimeSpan
from components.runtime.errors import ContractError

logger = logging.getLogger(__name__)

JUDGED_FROM_ROWS = 10_000
"""From this many rows on a file is judged while it is read, so that garbage stops early; and always at its end."""
NUM_EXAMPLES = 3
Named = Callable[[Path], str]
"""The name of a file for people."""


@dataclass
class _FileCounts:
    num_rows: int = 0
    num_malformed: int = 0
    examples: list[str] = field(default_factory=list)


class MalformedRows:
    """Collects malformed rows into the JSONL file at `path`, which exists only if there is one.

    `path` lies in a folder that is published as a whole, or discarded; `named` is what a file is called there: its
    path, or what it was copied from.
    """

    def __init__(
        self, path: Path, *, max_fraction: float = ExtractionSettings.max_malformed_fraction, named: Named = str
    ) -> None:
        if not 0 <= max_fraction <= 1:
            raise ContractError(f"max_malformed_fraction is {max_fraction}, expected 0 to 1")
        self.path = path
        self.num_rows = 0
        """Malformed rows so far, over all files."""
        self._max_fraction, self._named = max_fraction, named
        self._counts: dict[Path, _FileCounts] = {}
        self._mismatches: dict[str, SchemaMismatch] = {}
        self._absent: dict[Path, tuple[int, frozenset[str]]] = {}
        """The begin of each file's day, and the features that it lacks."""
        self._file: IO[str] | None = None

    def __enter__(self) -> "MalformedRows":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, path: Path, line: int, reason: str, *, text: str) -> None:
        """Records one malformed row; `count` must count it as well."""
        if self._file is None:
            self._file = self.path.open("w", encoding="utf-8")
        self._file.write(json.dumps({"file": self._named(path), "line": line, "reason": reason, "text": text}) + "\n")
        self.num_rows += 1
        counts = self._counts.setdefault(path, _FileCounts())
        counts.num_malformed += 1
        if len(counts.examples) < NUM_EXAMPLES:
            counts.examples.append(f"line {line}: {reason}")

    def add_mismatches(self, columns: Iterable[SchemaMismatch]) -> None:
        """Records schema mismatches of a file, the first of each column."""
        for each in columns:
            self._mismatches.setdefault(each.column, each)

    def add_absent(self, path: Path, features: Iterable[str], *, day: TimeSpan) -> None:
        """Records the features that a file of that day lacks; they count as missing in its rows."""
        self._absent[path] = (day.start or 0, frozenset(features))

    @property
    def schema_mismatches(self) -> list[dict[str, Any]]:
        """See `RawDataset.schema_mismatches`."""
        return [each._replace(file=self._named(Path(each.file)))._asdict() for each in self._mismatches.values()]

    def count(self, path: Path, num_rows: int) -> None:
        """Counts rows of `path`, malformed ones included, and judges the file once it has shown enough of them.

        Raises:
            ContractError: too many of the file's rows so far are malformed.
        """
        counts = self._counts.setdefault(path, _FileCounts())
        counts.num_rows += num_rows
        if counts.num_rows >= JUDGED_FROM_ROWS:
            self._judge_file(path, counts)

    def judge(self) -> None:
        """Judges every file read.

        A feature that a recommender got later is absent from the files of the days before. So it may be absent from a
        file where no file of an earlier day has it, and some other file does.

        Raises:
            ContractError: too many of a file's rows are malformed; names the file, the counts and the first examples.
                Or a file lacks a feature that it should have.
        """
        for feature in sorted(frozenset().union(*(absent for _, absent in self._absent.values()))):
            self._judge_absence(feature)
        for path, counts in self._counts.items():
            self._judge_file(path, counts)
            if counts.num_malformed:
                logger.warning("%s: %d of %d rows are malformed", path, counts.num_malformed, counts.num_rows)

    def _judge_absence(self, feature: str) -> None:
        without = {path: day for path, (day, absent) in self._absent.items() if feature in absent}
        with_it = [day for path, (day, _) in self._absent.items() if path not in without]
        last = max(without, key=lambda path: without[path])
        if not with_it:
            others = f" and {len(without) - 1} other files" if len(without) > 1 else ""
            raise ContractError(
                f"{self._named(last)}{others} lack the column {feature}, expected it in one file of the window at least"
            )
        if without[last] > min(with_it):
            raise ContractError(
                f"{self._named(last)} lacks the column {feature}, which a file of an earlier day has; expected it "
                "in the files of all later days"
            )
        logger.warning("%d of %d files lack the column %s", len(without), len(self._absent), feature)

    def _judge_file(self, path: Path, counts: _FileCounts) -> None:
        if counts.num_malformed > self._max_fraction * counts.num_rows:
            share = counts.num_malformed / max(counts.num_rows, 1)
            raise ContractError(
                f"{path}: {counts.num_malformed} of {counts.num_rows} rows are malformed ({share:.2%}), expected at "
                f"most {self._max_fraction:.2%}; first: {'; '.join(counts.examples)}"
            )
