"""Recommenders for tests and benchmarks, and functions that draw rows and accept recommenders."""

import json
import shlex
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from evergreen.config.features import MISSING_CATEGORY, Features, ListOptions
from evergreen.config.spec import Recommender
from evergreen.contracts.criteo import CRITEO_RECOMMENDER
from evergreen.registry.recommenders import accept, read_accepted
from testing.served_names import MODEL_NAME

SHOP = Recommender(
    name=MODEL_NAME,
    features=Features(
        numeric=("price", "age"),
        categorical=("item", "shop", "user"),
        lists=("genres", "seen"),
        list_options={
            "genres": ListOptions(max=3, pool="sum"),
            "seen": ListOptions(max=2, table="item"),
        },
    ),
)
"""Features with every kind of column: numbers, categories, a summed list, and an averaged list that
shares a column's vectors."""


def draw_arrays(
    features: Features, rows: int, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draw arrays: dense [rows, n] and categorical [rows, m]. A fifth of the values are missing."""
    dense = random.integers(0, 100, (rows, len(features.numeric))).astype(np.float32)
    dense[random.random(dense.shape) < 0.2] = np.nan
    categorical = random.integers(0, 2**32, (rows, len(features.position_names)), dtype=np.int64)
    categorical[random.random(categorical.shape) < 0.2] = MISSING_CATEGORY
    for start, stop, _ in features.positions.lists:
        # A list is padded at its end.
        elements = categorical[:, start:stop]
        order = np.argsort(elements == MISSING_CATEGORY, axis=1, kind="stable")
        categorical[:, start:stop] = np.take_along_axis(elements, order, 1)
    return dense, categorical


def arrays_of(table: Any, features: Features = SHOP.features) -> tuple[np.ndarray, np.ndarray]:
    """Return a table's dense values [n, d] and categories [n, positions], as rows are served.

    A missing number is NaN. A missing category and an empty position of a list are -1.
    """
    dense = [
        [np.nan if value is None else value for value in table[name].to_pylist()]
        for name in features.numeric
    ]
    columns = [
        [MISSING_CATEGORY if value is None else value for value in table[name].to_pylist()]
        for name in features.categorical
    ]
    for name in features.lists:
        most = features.list_options_of(name).max
        rows = [(elements or [])[-most:] for elements in table[name].to_pylist()]
        padded = [row + [MISSING_CATEGORY] * (most - len(row)) for row in rows]
        columns += np.reshape(padded, (-1, most)).T.tolist()
    return np.array(dense, np.float32).T, np.array(columns, np.int64).T


def criteo_with(**sections: dict[str, Any]) -> Recommender:
    """Return Criteo's recommender with changed settings. Each keyword is the name of a section."""
    return with_sections(CRITEO_RECOMMENDER, **sections)


def shop_with(**sections: dict[str, Any]) -> Recommender:
    """Return the default recommender with changed settings.

    Each keyword is the name of a section.
    """
    return with_sections(SHOP, **sections)


def with_sections(recommender: Recommender, **sections: dict[str, Any]) -> Recommender:
    """Return the recommender with changed settings. Each keyword is the name of a section."""
    return recommender.with_settings(
        {
            f"{section}.{name}": value
            for section, values in sections.items()
            for name, value in values.items()
        }
    )


def accept_into(store: Path, recommender: Recommender = SHOP) -> None:
    """Accept the recommender in the registry, unless it is the newest accepted recommender."""
    lines = read_accepted(store)
    if not lines or lines[-1].digest != recommender.digest:
        accept(
            store,
            recommender,
            who="a test",
            why="a test",
            now=datetime(2026, 1, 1, tzinfo=timezone.utc),
        )


def settings_text(changes: dict[str, Any]) -> str:
    """Return a text for the parameter `settings`. The keys of `changes` are paths of settings.

    Strings are written without quotes.
    """
    words = (
        f"{path}={value if isinstance(value, str) else json.dumps(value)}"
        for path, value in changes.items()
    )
    return shlex.join(words)
