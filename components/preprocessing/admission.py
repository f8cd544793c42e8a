"""What one round tells the next about its categories, as a file in the workflow's folder.

Beside the vocabularies, which every reader of a workflow needs, this is for the next round's preprocessing only: when
each category was last seen, and the counts of those that have not entered. It lies in the folder that training copies
into the model, so going back to an older model goes back to what was known then. What it decides is `vocabularies`'.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from components.contracts.criteo import CATEGORICAL
from components.contracts.workflow import FeatureWorkflow
from components.preprocessing.vocabularies import Candidates, Column, unseen_column
from components.runtime.durable import write_whole
from components.runtime.errors import ContractError

ADMISSION_FILE = "admission.npz"
"""Per column, int64: `C1` (last seen, per id); of its candidates `C1_candidates`, `C1_sightings`, `C1_last_seen`."""


def microseconds(name: str, text: str) -> int:
    """Microseconds of UTC since 1970 of an ISO 8601 time with an offset.

    Raises:
        ContractError: `text`, which errors call `name`, is something else.
    """
    try:
        return (datetime.fromisoformat(text) - datetime(1970, 1, 1, tzinfo=timezone.utc)) // timedelta(microseconds=1)
    except (ValueError, TypeError) as error:
        raise ContractError(f"{name} is {text!r}, expected an ISO 8601 time with an offset") from error


def save(columns: Sequence[Column], folder: Path) -> None:
    """Writes what is remembered of the 26 columns into `folder`; the same columns give the same bytes."""
    arrays: dict[str, Any] = {}
    for name, column in zip(CATEGORICAL, columns):
        known = column.candidates
        arrays |= {name: column.last_seen, f"{name}_candidates": known.categories}
        arrays |= {f"{name}_sightings": known.sightings, f"{name}_last_seen": known.last_seen}
    content = io.BytesIO()
    # All that one window held has one time: compressed, a million ids of 30 windows take 1 MB instead of 8.
    np.savez_compressed(content, **{name: array.astype("<i8") for name, array in arrays.items()})
    write_whole(folder / ADMISSION_FILE, content.getvalue())


def load(folder: Path, features: FeatureWorkflow, *, otherwise_last_seen: int) -> list[Column]:
    """The 26 columns of the workflow `features` in `folder`.

    Args:
        folder: A workflow's folder.
        features: The workflow in it.
        otherwise_last_seen: Time that counts as every category's last where the folder is of a round before such
            things were remembered; microseconds of UTC since 1970.

    Raises:
        ContractError: the file is damaged, or not of these vocabularies.
    """
    path = folder / ADMISSION_FILE
    if not path.exists():
        return [unseen_column(vocabulary, last_seen=otherwise_last_seen) for vocabulary in features.vocabularies]
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return [_column(name, v, arrays, path) for name, v in zip(CATEGORICAL, features.vocabularies)]
    except (OSError, KeyError, ValueError, EOFError, BadZipFile) as error:
        if isinstance(error, ContractError):
            raise
        raise ContractError(f"{path} cannot be read: {error}") from error


def _column(name: str, vocabulary: NDArray[np.int64], arrays: Any, path: Path) -> Column:
    last_seen, known = arrays[name], arrays[f"{name}_candidates"]
    candidates = Candidates(
        categories=known, sightings=arrays[f"{name}_sightings"], last_seen=arrays[f"{name}_last_seen"]
    )
    if last_seen.shape != vocabulary.shape:
        raise ContractError(f"{path} has {len(last_seen)} ids of {name}, expected its vocabulary's {len(vocabulary)}")
    if not known.shape == candidates.sightings.shape == candidates.last_seen.shape:
        raise ContractError(f"{path} has candidates of {name} without a count or a time, expected both for each")
    if (np.diff(known) <= 0).any() or np.isin(known, vocabulary).any():
        raise ContractError(f"candidates of {name} in {path} are not ascending or have an id, expected neither")
    return Column(vocabulary=vocabulary, last_seen=last_seen, candidates=candidates)
