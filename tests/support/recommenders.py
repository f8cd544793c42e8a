"""Criteo's recommender with other settings, accepted into a store or written as a run's parameter."""

import json
import shlex
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from evergreen.config.spec import Recommender
from evergreen.contracts.criteo import CRITEO_RECOMMENDER
from evergreen.registry.recommenders import accept, read_accepted


def criteo_with(**sections: dict[str, Any]) -> Recommender:
    """Criteo's with these settings by section."""
    return CRITEO_RECOMMENDER.with_settings(
        {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}
    )


def accept_into(store: Path, recommender: Recommender = CRITEO_RECOMMENDER) -> None:
    """Makes it the newest of the store, where it is not."""
    lines = read_accepted(store)
    if not lines or lines[-1].digest != recommender.digest:
        accept(store, recommender, who="a test", why="a test", now=datetime(2026, 1, 1, tzinfo=timezone.utc))


def settings_text(changes: dict[str, Any]) -> str:
    """The settings by path as the parameter `settings` takes them; a text is written as it is."""
    words = (f"{path}={value if isinstance(value, str) else json.dumps(value)}" for path, value in changes.items())
    return shlex.join(words)
