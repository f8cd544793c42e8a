"""The fitted feature workflow: vocabularies and dense arithmetic, independent of any library.

Preprocessing fits the workflow, and deployment writes it into the served graph. The next run's
preprocessing continues with the workflow. Preprocessing decides which categories enter and leave,
and stores its own state in other files.

The ids are 0 for padding (a position of a list without an element), 1 for missing, 2 for out of
vocabulary, and 3 + position in the vocabulary for a category. The id of a category never changes
while the category is in the vocabulary. The position of an evicted category is set to `TOMBSTONE`,
so that no other id changes. A later run may give the id of an evicted category to a new category.

Dense columns are transformed according to their `features.NumericOptions`, with NVTabular's
operators FillMissing, Clip, LogOp and Normalize. The logarithm gives the same bits on every
platform (`FeatureWorkflow.encode_dense`). A column with buckets is not a dense input. The operator
Bucketize converts the value of a bucketed column to a bucket number, starting at 0. The bucket
number is used as a category, and the id of this category never changes.

`vocabulary_changes` returns what one run changed in the vocabularies. Preprocessing reports the
changes, training reinitializes the rows of changed ids, and evaluation measures rows with changed
ids separately.
"""

import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from evergreen.config.features import MAX_CATEGORY, MISSING_CATEGORY, Features, NumericOptions
from evergreen.config.reader import read_mapping
from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import ContractError

_FORMAT_VERSION = 6
"""Format version of the files. Files of any other version are refused."""
PADDING_ID = 0
MISSING_ID = 1
OOV_ID = 2
FIRST_ID = 3
TOMBSTONE = -2
"""Value in a vocabulary for an unused id, whose category was evicted. A category in the raw rows is
never negative, except `MISSING_CATEGORY`."""

SETTINGS_FILE = "workflow.json"
VOCABULARIES_FILE = "vocabularies.npz"


def unscaled(features: Features, dense: NDArray[np.float32]) -> NDArray[np.float32]:
    """Fill and clip the raw numbers [n, d], and take the logarithm of logged features.

    The numbers are not scaled. NaN is missing. The result has the type float32. The logarithm is
    computed in float64 and rounded, because float32 logarithms differ in their last bits between
    libraries and processors. In some libraries, the last bits even depend on the position in the
    array.
    """
    options = [features.options_of(name) for name in features.numeric]
    values: NDArray[np.float32] = np.where(
        np.isnan(dense), np.array([each.fill for each in options], np.float32), dense
    ).astype(np.float32)
    bounds = np.array([each.bounds for each in options], np.float32).reshape(-1, 2)
    values = np.minimum(np.maximum(values, bounds[:, 0]), bounds[:, 1])
    logged = [each.is_logged for each in options]
    shifted = (values[:, logged] + np.float32(1)).astype(np.float64)
    values[:, logged] = np.log(shifted).astype(np.float32)
    return values


def clipped(values: NDArray[np.float32], options: NumericOptions) -> NDArray[np.float32]:
    """Clip the values of a numeric column before they are converted to buckets. NaN stays NaN."""
    least, largest = np.array(options.bounds, np.float32)
    found: NDArray[np.float32] = np.minimum(np.maximum(values, least), largest)
    return found


@dataclass(frozen=True, kw_only=True)
class FeatureWorkflow:
    """A fitted workflow.

    Raises:
        ContractError: the numbers of columns and features differ, a category occurs twice or is
            outside [0, 2^52), or a std is not positive. The error is also raised if bucket
            boundaries are not ascending, or if there are too many. The error is also raised if an
            excluded column is not a feature, occurs twice, or has a vocabulary.
    """

    features: Features
    vocabularies: tuple[NDArray[np.int64], ...]
    """Categories of each slot in the order of their ids. The value `TOMBSTONE` may occur several
    times."""
    means: NDArray[np.float32]
    """Value that the last step subtracts from each numeric feature, [d]: the mean, the minimum for
    `minmax`, or 0."""
    stds: NDArray[np.float32]
    """Divisor of each numeric feature, [d]: the standard deviation, the width of the range for
    `minmax`, or 1. The subtraction comes before the division."""
    frequency_threshold: int
    """Minimum count of a category, summed over runs, to enter a vocabulary. The value is the
    setting of the newest run."""
    excluded: tuple[str, ...] = ()
    """Features on which the model was not trained. The values of an excluded feature are ignored
    and count as missing."""
    boundaries: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """Lower ends of the buckets of each bucketed feature, ascending. The first bucket has no lower
    boundary."""

    def __post_init__(self) -> None:
        numeric, slots = self.features.numeric, self.features.slots
        if len(self.vocabularies) != len(slots):
            raise ContractError(
                f"workflow has {len(self.vocabularies)} vocabularies, expected {len(slots)}"
            )
        for name, (categories, _) in zip(slots, self._sorted):
            if (categories[1:] == categories[:-1]).any():
                raise ContractError(f"vocabulary of {name} holds a category twice")
            if len(categories) and (categories[0] < 0 or categories[-1] > MAX_CATEGORY):
                raise ContractError(
                    f"vocabulary of {name} holds values from {categories[0]} to {categories[-1]}, "
                    f"expected categories from 0 to {MAX_CATEGORY}, or {TOMBSTONE} for an unused id"
                )
        for name, values in (("means", self.means), ("stds", self.stds)):
            if values.shape != (len(numeric),) or not np.isfinite(values).all():
                raise ContractError(
                    f"{name} of the workflow are {values!r}, expected {len(numeric)} finite values"
                )
        if (self.stds <= 0).any():
            raise ContractError(
                f"std of {numeric[int(np.argmin(self.stds))]} is {self.stds.min()}, expected > 0"
            )
        if len(set(self.excluded)) < len(self.excluded) or not set(self.excluded) <= set(
            self.features.names
        ):
            raise ContractError(
                f"excluded columns are {list(self.excluded)}, expected names of features without "
                "repetition"
            )
        if known := [
            name for name, v in zip(slots, self.vocabularies) if name in self.excluded and len(v)
        ]:
            raise ContractError(f"excluded columns {known} have vocabularies, expected none")
        self._expect_boundaries()
        for position, category in self.features.served_as.items():
            name = self.features.categorical[position]
            if name not in self.excluded and category not in self.vocabularies[position]:
                raise ContractError(
                    f"{name} is served as {category}, expected one of its categories"
                )

    def _expect_boundaries(self) -> None:
        if set(self.boundaries) != set(self.features.bucketed):
            raise ContractError(
                f"boundaries are given for {list(self.boundaries)}, expected "
                f"{list(self.features.bucketed)}"
            )
        for name, values in self.boundaries.items():
            num_buckets = self.features.options_of(name).num_buckets
            categories = np.arange(0 if name in self.excluded else num_buckets)
            if not np.array_equal(self.vocabularies[self.features.slots.index(name)], categories):
                raise ContractError(
                    f"vocabulary of {name} differs from the numbers of its buckets, expected "
                    f"{len(categories)} categories, ascending from 0"
                )
            if (
                len(values) >= num_buckets
                or not np.isfinite(values).all()
                or (np.diff(values) <= 0).any()
            ):
                raise ContractError(
                    f"boundaries of {name} are {values}, expected fewer than {num_buckets} finite "
                    "numbers in ascending order"
                )

    @property
    def slot_sizes(self) -> list[int]:
        """Return the number of ids per slot, including tombstones."""
        return [FIRST_ID + len(v) for v in self.vocabularies]

    @property
    def tombstones(self) -> list[int]:
        """Return the number of ids without a category, per slot."""
        return [
            len(v) - len(categories) for v, (categories, _) in zip(self.vocabularies, self._sorted)
        ]

    @cached_property
    def _sorted(self) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Return the ascending categories of each slot, with their positions in the vocabulary.

        Tombstones are omitted.
        """
        positions = [np.flatnonzero(v != TOMBSTONE) for v in self.vocabularies]
        orders = [p[np.argsort(v[p], kind="stable")] for v, p in zip(self.vocabularies, positions)]
        return [(v[o], o.astype(np.int64)) for v, o in zip(self.vocabularies, orders)]

    def encode_categorical(self, categorical: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the ids [n, `features.id_positions`] of categories.

        `MISSING_CATEGORY` is encoded as the id for missing, or as padding in a list. Any other
        value without an id is encoded as out of vocabulary, even a negative one such as
        `TOMBSTONE`. Every value of an excluded column is encoded as missing, or as padding in a
        list. The values of bucketed columns must be buckets (see `with_buckets`).
        """
        ids = np.empty(categorical.shape, np.int64)
        for position in range(categorical.shape[1]):
            ids[:, position] = self.encode_position(position, categorical[:, position])
        return ids

    def encode_position(self, position: int, categories: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the ids [n] of the categories in one column.

        `position` is the position of the column in `features.id_positions`. See
        `encode_categorical`.
        """
        feature = self.features.id_features[position]
        absent = PADDING_ID if feature in self.features.lists else MISSING_ID
        if feature in self.excluded:
            return np.full(len(categories), absent)
        keys, positions = self._sorted[self.features.id_positions.slots[position]]
        ids = np.full(len(categories), OOV_ID)
        if len(keys):
            found = np.minimum(np.searchsorted(keys, categories), len(keys) - 1)
            known = keys[found] == categories
            ids[known] = FIRST_ID + positions[found[known]]
        ids[categories == MISSING_CATEGORY] = absent
        return ids

    def with_buckets(
        self, dense: NDArray[np.float32], categorical: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the columns of categories, followed by the columns of buckets.

        Args:
            dense: Raw numbers, [n, d].
            categorical: Categories, [n, `features.positions`].
        """
        numeric, bucketed = self.features.numeric, self.features.bucketed
        columns = [self._buckets(name, dense[:, numeric.index(name)]) for name in bucketed]
        return np.column_stack([categorical, *columns]) if columns else categorical

    def _buckets(self, name: str, values: NDArray[np.float32]) -> NDArray[np.int64]:
        """Return the bucket of each value, or `MISSING_CATEGORY` for a missing value.

        A value on a boundary is in the upper bucket.
        """
        found = np.searchsorted(
            self.boundaries[name], clipped(values, self.features.options_of(name)), side="right"
        )
        return np.where(np.isnan(values), MISSING_CATEGORY, found).astype(np.int64)

    @property
    def served_ids(self) -> dict[int, int]:
        """Return the fixed id of each position whose feature is served with a fixed value.

        See `CategoricalOptions.served_as`.
        """
        found = {}
        for position, category in self.features.served_as.items():
            is_excluded = self.features.categorical[position] in self.excluded
            found[position] = (
                MISSING_ID
                if is_excluded
                else FIRST_ID + self.vocabularies[position].tolist().index(category)
            )
        return found

    @property
    def excluded_dense(self) -> list[int]:
        """Return the positions of the excluded dense columns."""
        return [
            self.features.numeric.index(name)
            for name in self.excluded
            if name in self.features.numeric
        ]

    def encode_dense(self, dense: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the network's dense inputs, [n, `features.dense_inputs`], from raw numbers [n, d].

        NaN counts as missing. All values of an excluded column count as missing too.
        """
        numeric = self.features.numeric
        is_missing = np.isnan(dense)
        is_missing[:, self.excluded_dense] = True
        values = unscaled(self.features, np.where(is_missing, np.float32(np.nan), dense))
        scaled = ((values - self.means) / self.stds).astype(np.float32)
        indicators = is_missing[:, [numeric.index(name) for name in self.features.indicated]]
        if self.features.bucketed:
            scaled = scaled[:, self.features.plain_numeric]
        return np.concatenate([scaled, indicators.astype(np.float32)], axis=1)

    def save(self, folder: Path) -> None:
        """Write the workflow into `folder`, which may have other files."""
        arrays = io.BytesIO()
        # The stored arrays are named by column position, because some column names are not valid
        # array names.
        columns: dict[str, Any] = {f"{i}": v.astype("<i8") for i, v in enumerate(self.vocabularies)}
        np.savez(arrays, **columns)
        write_whole(folder / VOCABULARIES_FILE, arrays.getvalue())
        settings = {
            "format_version": _FORMAT_VERSION,
            "features": asdict(self.features),
            # The conversion of a float32 to float64 and to decimal text is exact.
            "means": [float(x) for x in self.means],
            "stds": [float(x) for x in self.stds],
            "frequency_threshold": self.frequency_threshold,
            "excluded": list(self.excluded),
            "boundaries": {name: values.tolist() for name, values in self.boundaries.items()},
        }
        write_whole(folder / SETTINGS_FILE, json.dumps(settings, indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> "FeatureWorkflow":
        """Return the workflow in `folder`.

        Raises:
            ContractError: a file is absent, corrupt or of another format version.
        """
        try:
            settings = dict(json.loads((folder / SETTINGS_FILE).read_text()))
            version = settings.pop("format_version", None)
            if version == _FORMAT_VERSION:
                features = settings["features"] = read_mapping(
                    Features, settings["features"], path="features"
                )
                with np.load(folder / VOCABULARIES_FILE, allow_pickle=False) as arrays:
                    settings["vocabularies"] = tuple(
                        arrays[f"{i}"] for i in range(len(features.slots))
                    )
                for name in ("means", "stds"):
                    settings[name] = np.array(settings[name], dtype=np.float32)
                settings["excluded"] = tuple(settings["excluded"])
                found = settings["boundaries"].items()
                settings["boundaries"] = {
                    name: np.array(values, np.float32) for name, values in found
                }
                return cls(**settings)
        except (
            OSError,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            EOFError,
            BadZipFile,
        ) as error:
            raise ContractError(f"feature workflow in {folder} cannot be read: {error}") from error
        raise ContractError(
            f"feature workflow in {folder} has format_version {version}, expected {_FORMAT_VERSION}"
        )


@dataclass(frozen=True, eq=False)
class VocabularyChange:
    """Changes of the ids of one column. The ids in each array are ascending."""

    entered: NDArray[np.int64]
    """Ids that have a category now but had none before. Some of these ids are new, and some were
    tombstones before."""
    reused: NDArray[np.int64]
    """Ids in `entered` that were unused in the previous vocabulary (marked as `TOMBSTONE`)."""
    evicted: NDArray[np.int64]
    """Ids that had a category and are now tombstones."""


def vocabulary_changes(
    before: FeatureWorkflow | None, now: FeatureWorkflow
) -> list[VocabularyChange]:
    """Return the changes of each vocabulary of `now` compared with `before`.

    If `before` is None or lacks a slot, all categories of the slot are new.

    Raises:
        ContractError: an id changed its category without being a tombstone in between, a category
            moved to another id, or a vocabulary shrank. In these cases, the trained weights do not
            fit the new workflow.
    """
    earlier = dict(zip(before.features.slots, before.vocabularies)) if before else {}
    nothing = np.zeros(0, np.int64)
    return [
        _change(name, earlier.get(name, nothing), each)
        for name, each in zip(now.features.slots, now.vocabularies)
    ]


def _change(name: str, before: NDArray[np.int64], now: NDArray[np.int64]) -> VocabularyChange:
    if len(now) < len(before):
        raise ContractError(
            f"vocabulary of {name} has {len(now)} ids, expected at least {len(before)}, "
            "the number before this run"
        )
    kept = now[: len(before)]
    was_used, is_used = before != TOMBSTONE, kept != TOMBSTONE
    if len(replaced := np.flatnonzero(was_used & is_used & (kept != before))):
        at = replaced[0]
        raise ContractError(
            f"id {FIRST_ID + at} of {name} is now category {kept[at]}, expected category "
            f"{before[at]} as before, or a tombstone ({len(replaced)} such ids)"
        )
    reused, evicted = np.flatnonzero(is_used & ~was_used), np.flatnonzero(was_used & ~is_used)
    appended = len(before) + np.flatnonzero(now[len(before) :] != TOMBSTONE)
    entered = np.concatenate([reused, appended])
    if len(moved := np.intersect1d(now[entered], before[evicted])):
        raise ContractError(
            f"category {moved[0]} of {name} moved to another id, expected it to keep its id"
        )
    return VocabularyChange(
        entered=FIRST_ID + entered, reused=FIRST_ID + reused, evicted=FIRST_ID + evicted
    )
