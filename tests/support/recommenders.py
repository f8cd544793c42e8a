"""Criteo's recommender with other settings, in a registry or as a run's parameter."""

import json
import shlex
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from evergreen.config.spec import Recommender
from evergreen.contracts.criteo import CRITEO_RECOMMENDER
from evergreen.registry.recommenders import accept, read_accepted


def criteo_with(**sections: dict[str, Any]) -> Recommender:
    """Return Criteo's recommender with these settings by section."""
    return CRITEO_RECOMMENDER.with_settings(
        {
            f"{section}.{name}": value
            for section, values in sections.items()
            for name, value in values.items()
        }
    )


def accept_into(store: Path, recommender: Recommender = CRITEO_RECOMMENDER) -> None:
    """Make this recommender the newest one of the registry, unless it already is."""
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
    """Format settings by path for the parameter `settings`. Strings are written without quotes."""
    words = (
        f"{path}={value if isinstance(value, str) else json.dumps(value)}"
        for path, value in changes.items()
    )
    return shlex.join(words)
