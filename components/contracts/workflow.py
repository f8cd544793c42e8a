"""The fitted feature workflow: vocabularies and the arithmetic on the dense columns, independent of any library.

Joins preprocessing, which fits it with NVTabular, to deployment, which writes it into the served graph, and to the
next round's preprocessing, which carries it on. Which categories enter and leave is preprocessing's, and so is what it
remembers of them beside these files; what changed between two workflows is `vocabulary_changes`'.

Ids: 0 padding (a place of a list without an element), 1 missing, 2 out of vocabulary, 3 + position in the vocabulary.
An id never moves while its category lives. Where a category was evicted its position holds `TOMBSTONE`, so that no
other id moves; a later round may give that id to a new category.
Dense: what `features.NumericOptions` says of each column, by NVTabular's operators FillMissing, Clip, LogOp and
Normalize, with a logarithm that gives the same bits everywhere (`FeatureWorkflow.encode_dense`).
"""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from components.contracts.features import MAX_CATEGORY, MISSING_CATEGORY, Features
from components.contracts.recommender import settings_of
from components.runtime.durable import write_whole
from components.runtime.errors import ContractError

FORMAT_VERSION = 5
"""Of the files; other versions are refused."""
PADDING_ID = 0
MISSING_ID = 1
OOV_ID = 2
FIRST_ID = 3
TOMBSTONE = -2
"""In a vocabulary: this id has no category. No raw category is negative, and a missing one is `MISSING_CATEGORY`."""

SETTINGS_FILE = "workflow.json"
VOCABULARIES_FILE = "vocabularies.npz"


@dataclass(frozen=True, kw_only=True)
class FeatureWorkflow:
    """A fitted workflow.

    Raises:
        ContractError: other numbers of columns than features, a category twice or outside [0, 2^52), a std that is not
            positive, an excluded column that is no feature, is named twice, or has a vocabulary.
    """

    features: Features
    vocabularies: tuple[NDArray[np.int64], ...]
    """Per slot, the categories in the order of their ids; `TOMBSTONE` any number of times."""
    means: NDArray[np.float32]
    """What is subtracted last, [d], one for each numeric feature: a mean, for `minmax` the least value, or 0."""
    stds: NDArray[np.float32]
    """What is then divided by, [d]: a standard deviation, for `minmax` the width of the range, or 1."""
    frequency_threshold: int
    """Sightings, summed over rounds, that a category needed in the last round to enter a vocabulary."""
    excluded: tuple[str, ...] = ()
    """Features that the model did not learn from: they count as missing, whatever a row holds there."""

    def __post_init__(self) -> None:
        """Refuses what could not have been fitted."""
        numeric, slots = self.features.numeric, self.features.slots
        if len(self.vocabularies) != len(slots):
            raise ContractError(f"workflow has {len(self.vocabularies)} vocabularies, expected {len(slots)}")
        for name, (categories, _) in zip(slots, self._sorted):
            if (categories[1:] == categories[:-1]).any():
                raise ContractError(f"vocabulary of {name} holds a category twice")
            if len(categories) and (categories[0] < 0 or categories[-1] > MAX_CATEGORY):
                raise ContractError(
                    f"vocabulary of {name} holds values from {categories[0]} to {categories[-1]}, expected categories "
                    f"from 0 to {MAX_CATEGORY}, or {TOMBSTONE} for an id without one"
                )
        for name, values in (("means", self.means), ("stds", self.stds)):
            if values.shape != (len(numeric),) or not np.isfinite(values).all():
                raise ContractError(f"workflow {name} are {values!r}, expected {len(numeric)} finite values")
        if (self.stds <= 0).any():
            raise ContractError(f"std of {numeric[int(np.argmin(self.stds))]} is {self.stds.min()}, expected > 0")
        if len(set(self.excluded)) < len(self.excluded) or not set(self.excluded) <= set(self.features.names):
            raise ContractError(f"excluded columns are {list(self.excluded)}, expected features, each once")
        if known := [name for name, v in zip(slots, self.vocabularies) if name in self.excluded and len(v)]:
            raise ContractError(f"excluded columns {known} have vocabularies, expected none")
        for place, category in self.features.served_as.items():
            name = self.features.categorical[place]
            if name not in self.excluded and category not in self.vocabularies[place]:
                raise ContractError(f"{name} is served as {category}, which is none of its categories, expected one")

    @property
    def slot_sizes(self) -> list[int]:
        """Number of ids per slot, those of tombstones included."""
        return [FIRST_ID + len(v) for v in self.vocabularies]

    @property
    def tombstones(self) -> list[int]:
        """Number of ids without a category, per slot."""
        return [len(v) - len(categories) for v, (categories, _) in zip(self.vocabularies, self._sorted)]

    @cached_property
    def _sorted(self) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Per slot, the categories in ascending order and the position of each; tombstones are not among them."""
        positions = [np.flatnonzero(v != TOMBSTONE) for v in self.vocabularies]
        orders = [p[np.argsort(v[p], kind="stable")] for v, p in zip(self.vocabularies, positions)]
        return [(v[o], o.astype(np.int64)) for v, o in zip(self.vocabularies, orders)]

    def encode_categorical(self, categorical: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ids [n, `features.places`] of raw categories (`MISSING_CATEGORY` = missing, in a list padding).

        Any other value without an id is out of vocabulary, a negative one (and so `TOMBSTONE`) too; but any value of an
        excluded column is missing, or padding.
        """
        absent = np.full(categorical.shape[1], PADDING_ID)
        absent[: len(self.features.categorical)] = MISSING_ID
        ids = np.full(categorical.shape, OOV_ID, dtype=np.int64)
        for place, slot in enumerate(self.features.places.slots):
            keys, positions = self._sorted[slot]
            raw = categorical[:, place]
            if len(keys):
                found = np.minimum(np.searchsorted(keys, raw), len(keys) - 1)
                known = keys[found] == raw
                ids[known, place] = FIRST_ID + positions[found[known]]
            ids[raw == MISSING_CATEGORY, place] = absent[place]
        left_out = np.isin(self.features.place_features, self.excluded)
        ids[:, left_out] = absent[left_out]
        return ids

    @property
    def served_ids(self) -> dict[int, int]:
        """The id in every row of each place that is served as one value, see `CategoricalOptions.served_as`."""
        found = {}
        for place, category in self.features.served_as.items():
            is_excluded = self.features.categorical[place] in self.excluded
            found[place] = MISSING_ID if is_excluded else FIRST_ID + self.vocabularies[place].tolist().index(category)
        return found

    @property
    def excluded_dense(self) -> list[int]:
        """Positions of the excluded dense columns."""
        return [self.features.numeric.index(name) for name in self.excluded if name in self.features.numeric]

    def encode_dense(self, dense: NDArray[np.float32]) -> NDArray[np.float32]:
        """The network's dense inputs [n, `features.dense_inputs`] of raw numbers [n, d].

        NaN is missing, and so is any value of an excluded column. In float32, but for the logarithm: float64's,
        rounded. Libraries' own float32 logarithms differ in the last bits from each other, from one processor to the
        next, and some by a value's place in the array.
        """
        numeric = self.features.numeric
        is_missing = np.isnan(dense)
        is_missing[:, self.excluded_dense] = True
        options = [self.features.options_of(name) for name in numeric]
        values = np.where(is_missing, np.array([each.fill for each in options], np.float32), dense).astype(np.float32)
        bounds = np.array([each.bounds for each in options], np.float32).reshape(-1, 2)
        values = np.minimum(np.maximum(values, bounds[:, 0]), bounds[:, 1])
        logged = [each.is_logged for each in options]
        shifted = (values[:, logged] + np.float32(1)).astype(np.float64)
        values[:, logged] = np.log(shifted).astype(np.float32)
        scaled = ((values - self.means) / self.stds).astype(np.float32)
        indicators = is_missing[:, [numeric.index(name) for name in self.features.indicated]]
        return np.concatenate([scaled, indicators.astype(np.float32)], axis=1)

    def save(self, folder: Path) -> None:
        """Writes the workflow into `folder`, whose other files stay."""
        arrays = io.BytesIO()
        # By position: not every name of a column can name an array there.
        columns: dict[str, Any] = {f"{i}": v.astype("<i8") for i, v in enumerate(self.vocabularies)}
        np.savez(arrays, **columns)
        write_whole(folder / VOCABULARIES_FILE, arrays.getvalue())
        settings = {
            "format_version": FORMAT_VERSION,
            "features": asdict(self.features),
            # A float32 survives the way through a decimal float64 unchanged.
            "means": [float(x) for x in self.means],
            "stds": [float(x) for x in self.stds],
            "frequency_threshold": self.frequency_threshold,
            "excluded": list(self.excluded),
        }
        write_whole(folder / SETTINGS_FILE, json.dumps(settings, indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> FeatureWorkflow:
        """The workflow in `folder`.

        Raises:
            ContractError: a file is absent, damaged or of another format version.
        """
        try:
            settings = dict(json.loads((folder / SETTINGS_FILE).read_text()))
            version = settings.pop("format_version", None)
            if version == FORMAT_VERSION:
                features = settings["features"] = settings_of(Features, settings["features"], path="features")
                with np.load(folder / VOCABULARIES_FILE, allow_pickle=False) as arrays:
                    settings["vocabularies"] = tuple(arrays[f"{i}"] for i in range(len(features.slots)))
                for name in ("means", "stds"):
                    settings[name] = np.array(settings[name], dtype=np.float32)
                settings["excluded"] = tuple(settings["excluded"])
                return cls(**settings)
        except (OSError, ValueError, TypeError, KeyError, EOFError, BadZipFile) as error:
            raise ContractError(f"feature workflow in {folder} cannot be read: {error}") from error
        raise ContractError(f"feature workflow in {folder} has format_version {version}, expected {FORMAT_VERSION}")
