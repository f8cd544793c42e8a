"""The most frequent words of categorical columns, and how people are shown a category: by its word where it is known.

Joins extraction, which reads the words, to whoever shows categories. A display dictionary only: nothing that is
learned, judged or served depends on it. Of a category whose word is not listed the number is shown; of a column that
says who a user is no value is shown.
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

LISTED_WORDS = 1000
"""Most words that are listed of a column."""
_HELD_WORDS = 20 * LISTED_WORDS
"""Most words of a column whose counts are held; then the rarer half is forgotten."""


class WordCounts:
    """Counts the words of columns in bounded memory; the same words in the same order give the same list.

    A word that is rare in some stretch of the rows may be forgotten there, so counts are lower bounds.
    """

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {}

    def add(self, column: str, words: Any) -> None:
        """Counts an Arrow array of texts; null and "" are none."""
        found = words.value_counts()
        pairs = zip(found.field("values").to_pylist(), found.field("counts").to_pylist())
        self._add(column, {word: count for word, count in pairs if word})

    def _add(self, column: str, found: Mapping[str, int]) -> None:
        counts = self._counts.setdefault(column, Counter())
        counts.update(found)
        if len(counts) > _HELD_WORDS:
            self._counts[column] = Counter(dict(_ordered(counts)[: _HELD_WORDS // 2]))

    def merge(self, newer: "WordCounts") -> None:
        """Adds what another counted in later rows."""
        for column, counts in newer._counts.items():
            self._add(column, counts)

    def write(self, path: Path, *, without: Collection[str]) -> bool:
        """Writes the lists to `path`, but not those of columns `without`; False, and no file, where there is none."""
        lists = {
            name: [word for word, _ in _ordered(counts)[:LISTED_WORDS]]
            for name, counts in sorted(self._counts.items())
            if name not in without and counts
        }
        if lists:
            write_whole(path, json.dumps(lists, ensure_ascii=False) + "\n")
        return bool(lists)


def _ordered(counts: Counter[str]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))


def read_words(path: Path) -> dict[str, dict[int, str]]:
    """By column, the word of each category that `WordCounts.write` listed.

    Raises:
        ContractError: the file is absent or corrupt.
    """
    try:
        lists = json.loads(path.read_text(encoding="utf-8"))
        return {name: {category_of(word): word for word in words} for name, words in lists.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ContractError(f"{path} holds no words of columns: {error}") from error


@dataclass(frozen=True, kw_only=True)
class ShownValues:
    """How people are shown the categories of a run's columns."""

    words: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """By column, the word of a category, where it is known."""
    hidden: Collection[str] = ()
    """Columns of which no value is shown, because it says who a user is (`Recommender.columns_of_users`)."""

    def text(self, column: str, category: int) -> str | None:
        """The quoted word of a category, else its number; None of a hidden column.

        >>> shown = ShownValues(words={"color": {244716414365860: "red"}}, hidden=["user"])
        >>> shown.text("color", 244716414365860), shown.text("color", 7), shown.text("user", 7)
        ("'red'", '7', None)
        """
        if column in self.hidden:
            return None
        words = self.words.get(column, {})
        return repr(words[category]) if category in words else str(category)
