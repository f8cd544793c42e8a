"""The most frequent texts of categorical columns, for the display of categories.

Extraction collects these texts. The texts are used only for display: training, evaluation and
serving do not depend on them. If a category's text is not listed, the category is shown as its
number. The values of a column that identifies users are never shown.
"""

import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evergreen.config.features import category_of
from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import ContractError

LISTED_TEXTS = 1000
"""Maximum number of texts that are listed per column."""
_COUNTED_TEXTS = 20 * LISTED_TEXTS
"""Maximum number of texts per column that are counted in memory. When a column has more texts, the
less frequent half of them is dropped."""


class TextCounts:
    """Counter of columns' texts, which uses bounded memory.

    The same texts in the same order always produce the same list of texts. The counts are lower
    bounds, because a text may be dropped in a part of the rows where it is rare.
    """

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {}

    def add(self, column: str, texts: Any) -> None:
        """Count the texts in an Arrow array. Null and "" are skipped."""
        found = texts.value_counts()
        pairs = zip(found.field("values").to_pylist(), found.field("counts").to_pylist())
        self._add(column, {text: count for text, count in pairs if text})

    def _add(self, column: str, found: Mapping[str, int]) -> None:
        counts = self._counts.setdefault(column, Counter())
        counts.update(found)
        if len(counts) > _COUNTED_TEXTS:
            self._counts[column] = Counter(dict(_ordered(counts)[: _COUNTED_TEXTS // 2]))

    def merge(self, newer: "TextCounts") -> None:
        """Add the counts of later rows."""
        for column, counts in newer._counts.items():
            self._add(column, counts)

    def write(self, path: Path, *, without: Collection[str]) -> bool:
        """Write the most frequent texts of each column to `path`, except for columns in `without`.

        Returns True if a file was written. No file is written if all lists are empty.
        """
        lists = {
            name: [text for text, _ in _ordered(counts)[:LISTED_TEXTS]]
            for name, counts in sorted(self._counts.items())
            if name not in without and counts
        }
        if lists:
            write_whole(path, json.dumps(lists, ensure_ascii=False) + "\n")
        return bool(lists)


def _ordered(counts: Counter[str]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))


def read_texts(path: Path) -> dict[str, dict[int, str]]:
    """Return the texts that `TextCounts.write` wrote, by column and category.

    Raises:
        ContractError: the file is absent or corrupt.
    """
    try:
        lists = json.loads(path.read_text(encoding="utf-8"))
        return {name: {category_of(text): text for text in texts} for name, texts in lists.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ContractError(f"{path} is not a file with the texts of columns: {error}") from error


@dataclass(frozen=True, kw_only=True)
class ShownValues:
    """Texts for the display of a run's categories."""

    texts: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """Known texts of categories, by column."""
    hidden: Collection[str] = ()
    """Columns whose values are never shown, because they identify users
    (`Recommender.columns_of_users`)."""

    def text(self, column: str, category: int) -> str | None:
        """Return the displayed form of a category: its quoted text, or else its number.

        Returns None for a hidden column.

        >>> shown = ShownValues(texts={"color": {244716414365860: "red"}}, hidden=["user"])
        >>> shown.text("color", 244716414365860), shown.text("color", 7), shown.text("user", 7)
        ("'red'", '7', None)
        """
        if column in self.hidden:
            return None
        texts = self.texts.get(column, {})
        return repr(texts[category]) if category in texts else str(category)
