"""The section `features`: the feature columns of a recommender, their order and their options.

Each recommender names its own features. `contracts.raw_rows` defines the other columns of raw rows.
A missing value is null in files. Tensors and log records have no null: a missing numeric value is
NaN, and a missing category is `MISSING_CATEGORY`.
"""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from evergreen.runtime.errors import FROM_SCRATCH, ContractError, run_again

MISSING_CATEGORY = -1
"""Value that represents a missing category in an int64 tensor. Real categories are never
negative."""
MAX_CATEGORY = 2**52 - 1
"""Largest category. NVTabular reads categories as float64, which represents whole numbers up to
`MAX_CATEGORY` exactly."""
INDICATOR = "{name}/missing"
"""Name of the dense input that indicates whether the feature `name` is missing. No feature's name
has a slash."""
_POSITION = "{name}/{number}"
"""Column name of one position of the list `name`. Positions are counted from 0."""
LENGTH = "{name}/length"
"""Name of the column of a profile that contains the lengths of the list `name`. The elements of the
list are counted under the list's own name."""
_LOG, _STANDARDIZE, _MINMAX = "log1p", "standardize", "minmax"
_NUMBER = r"[+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"
_CLIP = re.compile(rf"clip\(({_NUMBER})(?:\.\.({_NUMBER}))?\)")
_BUCKETS = re.compile(r"quantile_buckets\(([1-9]\d{0,8})\)", re.ASCII)
MAX_COLUMNS = 4096
"""Maximum number of tensor columns of a recommender. Each position in a list becomes one column."""
MAX_NAME = 200
"""Maximum length of a feature's name in characters."""
MAX_WIDTH = 4096
"""Maximum length of a category's vector."""
_MAX_BUCKETS = 1024
"""Maximum number of buckets of a feature. Serving compares each row with the lower end of every
bucket."""


def category_of(text: str) -> int:
    """Return the category of a text: its number if it is a whole number in range, else a hash.

    A number must be written as Python prints it. `true` and `false`, in any case, become 1 and 0.
    Programs write booleans in different cases (`lowered_boolean`). The hash is the upper 52 bits of
    the 8-byte BLAKE2b hash of the text. Among a million texts, the probability that two have the
    same category is 1 in 9,000. `contracts.values.text_of_value` converts a value of any type to
    its text.

    >>> [category_of(text) for text in ("7", "07", "red", "True", "false")]
    [7, 777266936069733, 244716414365860, 1, 0]
    """
    if _WHOLE.fullmatch(text) and int(text) <= MAX_CATEGORY:
        return int(text)
    if (word := lowered_boolean(text)) in BOOLEAN_TEXTS:
        return BOOLEAN_TEXTS.index(word)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 12


def lowered_boolean(text: str) -> str:
    """Return `true` or `false` if the text is a boolean in any case, else the text.

    Case and spaces around the text do not matter.

    >>> lowered_boolean("TRUE"), lowered_boolean(" False"), lowered_boolean("truth")
    ('true', 'false', 'truth')
    """
    lowered = text.strip().lower()
    return lowered if lowered in BOOLEAN_TEXTS else text


BOOLEAN_TEXTS = ("false", "true")
"""Canonical text of False and of True."""
_WHOLE = re.compile(r"0|[1-9][0-9]{0,15}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class CategoricalOptions:
    """Options of a categorical feature.

    Raises:
        ContractError: `embed` is below 1 or above `MAX_WIDTH`.
    """

    type: Literal["int64", "string"] = "int64"
    """`int64`: whole numbers of 64 bits, signed or unsigned. `string`: texts, including texts that
    are whole numbers. `true` and `false` in any case are the booleans in both types. A number
    from 0 to 2^52 - 1 is its own category, even if it is written as text. Any other value is hashed
    to 52 bits."""
    served_as: int | str | None = None
    """Value that the served model uses in every row instead of the row's own, such as 1 for the
    position of an item in a list. Training uses the real values, so that the network learns their
    effect. With a fixed position, the model does not rank an item higher only because the item was
    shown at a high position before. The gate also evaluates the model with this value. In rows that
    were served with the value, the mean score then equals the click rate. A request may omit a
    feature that is served with a fixed value. A logged row without the feature contributes nothing
    to the learned effect of the feature."""
    embed: int | None = None
    """Length of the categories' vectors, at least 1. null = the model's `embedding_dim`. Only the
    network `dcn` supports vectors of different lengths. The other networks multiply vectors with
    each other and need one length."""

    def __post_init__(self) -> None:
        _require_width(self.embed)


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """Options of a list of categories. A row may have an empty list.

    Raises:
        ContractError: `max` or `embed` is out of range, or `table` is set together with a type or
            `embed`.
    """

    type: Literal["int64", "string"] = "int64"
    """Type of the elements. If `table` is set, the list has the type of the feature in `table`."""
    max: int = 10
    """Maximum number of elements per row. If a list is longer, `keep` decides which elements are
    dropped."""
    keep: Literal["newest", "oldest"] = "newest"
    """Elements of a longer list that are used: the last ones (`newest`) or the first ones
    (`oldest`)."""
    pool: Literal["mean", "sum"] = "mean"
    """Function that combines the vectors of a row's elements. The vector of an empty list is
    zero."""
    table: str | None = None
    """Categorical feature whose vocabulary and embedding vectors the list uses. If no table is
    named, the list has its own vocabulary and vectors."""
    embed: int | None = None
    """Length of the elements' vectors, as for a categorical feature. If `table` names a feature,
    the list uses the vectors of that feature, and their length."""
    separator: str = "|"
    """Text between the elements in a text file. A field in brackets is read as a JSON list,
    whatever the separator is."""

    def __post_init__(self) -> None:
        if not 1 <= self.max <= MAX_COLUMNS:
            raise ContractError(
                f"max is {self.max}, expected at least 1 and at most {MAX_COLUMNS:,}"
            )
        if not self.separator:
            raise ContractError("separator is '', expected the text between the elements of a list")
        _require_width(self.embed)
        if self.table is not None and self.embed is not None:
            raise ContractError(
                f"embed is {self.embed}, expected none, because table {self.table!r} has an embed"
            )
        if self.table is not None and self.type != _LIST_TYPE:
            raise ContractError(
                f"type is {self.type!r}, expected none, because table {self.table!r} has a type"
            )


_LIST_TYPE = ListOptions.type


def _require_width(embed: int | None) -> None:
    if embed is not None and not 1 <= embed <= MAX_WIDTH:
        raise ContractError(f"embed is {embed}, expected at least 1 and at most {MAX_WIDTH:,}")


class PooledPositions(NamedTuple):
    """Positions of a list on the categorical axis: `start` (included) to `stop` (excluded).

    The vectors at these positions are pooled into one vector.
    """

    start: int
    stop: int
    pool: str
    """Name of the pooling function (see `ListOptions.pool`)."""


class FeaturePositions(NamedTuple):
    """Positions on the categorical axis: first the categorical features, then the lists."""

    slots: tuple[int, ...]
    """Slot of each position. The id at a position is looked up in the table of its slot."""
    lists: tuple[PooledPositions, ...]
    """Lists in the order of their pooled vectors. The pooled vectors follow the vectors of the
    categorical features and precede those of the bucketed features."""


@dataclass(frozen=True, kw_only=True)
class NumericOptions:
    """Options of a numeric feature, which decide how the feature becomes an input of the network.

    Raises:
        ContractError: `fill` or a bound is not a finite float32, or `transform` is not a valid
            sequence of steps.

    >>> NumericOptions(transform=("clip(-1..1)", "minmax")).bounds
    (-1.0, 1.0)
    >>> NumericOptions(transform=("quantile_buckets(32)",)).num_buckets
    32
    """

    fill: float = 0.0
    """Value that replaces a missing value, before the transform."""
    indicator: bool = False
    """Whether the network gets one more input, which is 1 if the value is missing and else 0."""
    transform: tuple[str, ...] = ("clip(0)", _LOG, _STANDARDIZE)
    """Sequence of steps in a fixed order. Each step of the sequence is optional. `clip(least)` or
    `clip(least..largest)` limits the value. `log1p` is the logarithm of 1 + x and needs a `clip` at
    0 or more. At most one scaling may follow: `standardize` (mean 0, standard deviation 1) or
    `minmax` (0 to 1), with statistics of the first run's rows. If all values of the first run are
    equal, this step only subtracts their common value. `quantile_buckets(n)` converts the number to
    one of n buckets, which have about equally many rows of the first run. `quantile_buckets` is
    used alone or after a `clip`. Each bucket has an embedding vector, which replaces the dense
    input. A missing value has a vector too. Equal quantiles are merged, so that there are fewer
    buckets. Later runs reuse the buckets and the scaling. The quantiles are exact (NumPy's method
    `higher`), and the first run needs 12 bytes for each distinct value of the column."""
    embed: int | None = None
    """Length of the buckets' vectors, as for a categorical feature."""

    def __post_init__(self) -> None:
        """Check the options, and normalize them so that equal options compare as equal."""
        object.__setattr__(self, "fill", _float32(self.fill, "fill"))
        object.__setattr__(
            self, "transform", tuple(_CLIP.sub(_plain, each) for each in self.transform)
        )
        kinds = [
            next((kind for kind, step in _STEPS.items() if step.fullmatch(each)), None)
            for each in self.transform
        ]
        if None in kinds:
            wrong = self.transform[kinds.index(None)]
            raise ContractError(
                f"transform holds {wrong!r}, which is not supported, expected clip(least), "
                "clip(least..largest), "
                "log1p, standardize, minmax or quantile_buckets(n)"
            )
        _require_width(self.embed)
        if "buckets" in kinds:
            self._expect_buckets(kinds)
        elif self.embed is not None:
            raise ContractError(
                f"embed is {self.embed}, expected no embed without quantile_buckets, because only "
                "buckets have vectors"
            )
        if [kind for kind in _STEPS if kind in kinds] != kinds:
            raise ContractError(
                f"transform is {list(self.transform)}, expected each of clip, log1p and one "
                "scaling at most once, in "
                "this order"
            )
        least, largest = self.bounds
        if least >= largest:
            raise ContractError(
                f"transform clips to [{least}, {largest}], expected the smaller number first"
            )
        if self.is_logged and least < 0:
            raise ContractError(
                f"transform is {list(self.transform)}, expected a clip at 0 or more before log1p"
            )

    def _expect_buckets(self, kinds: list[str | None]) -> None:
        """Refuse a wrong number of buckets, and options that have no effect on buckets."""
        if kinds not in (["buckets"], ["clip", "buckets"]):
            raise ContractError(
                f"transform is {list(self.transform)}, expected at most one clip and "
                "quantile_buckets last"
            )
        if not 2 <= self.num_buckets <= _MAX_BUCKETS:
            raise ContractError(
                f"transform has quantile_buckets({self.num_buckets}), expected 2 to {_MAX_BUCKETS} "
                "buckets"
            )
        if self.fill or self.indicator:
            raise ContractError(
                f"fill is {self.fill} and indicator {self.indicator} with quantile_buckets, "
                "expected neither: a "
                "missing value has its own vector"
            )

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the bounds of the clip, or minus and plus infinity without a clip."""
        if match := next(filter(None, map(_CLIP.fullmatch, self.transform)), None):
            return float(match[1]), float(match[2] or math.inf)
        return -math.inf, math.inf

    @property
    def is_logged(self) -> bool:
        """Return whether the transform includes the logarithm."""
        return _LOG in self.transform

    @property
    def is_standardized(self) -> bool:
        """Return whether the scaling is `standardize`."""
        return _STANDARDIZE in self.transform

    @property
    def is_minmax(self) -> bool:
        """Return whether the scaling is `minmax`."""
        return _MINMAX in self.transform

    @property
    def num_buckets(self) -> int:
        """Return the maximum number of buckets, or 0 if the feature has no buckets."""
        match = _BUCKETS.fullmatch(self.transform[-1]) if self.transform else None
        return int(match[1]) if match else 0


def _float32(number: float, what: str) -> float:
    """Check that the number is a finite float32, and return it. -0.0 becomes 0.0."""
    if not abs(number) <= _LARGEST:
        raise ContractError(f"{what} is {number}, expected a finite float32")
    return number + 0.0


def _plain(clip: re.Match[str]) -> str:
    bounds = [
        _float32(float(bound), "transform: bound of clip") for bound in clip.groups() if bound
    ]
    return f"clip({'..'.join(repr(bound).removesuffix('.0') for bound in bounds)})"


_LARGEST = (2 - 2**-23) * 2.0**127
"""Largest finite float32."""
_STEPS = {"clip": _CLIP, _LOG: re.compile(_LOG), "scaling": re.compile(f"{_STANDARDIZE}|{_MINMAX}")}
_STEPS["buckets"] = _BUCKETS
"""Patterns of the steps of a transform, in their required order."""
_NUMERIC_DEFAULTS, _CATEGORICAL_DEFAULTS, _LIST_DEFAULTS = (
    NumericOptions(),
    CategoricalOptions(),
    ListOptions(),
)


@dataclass(frozen=True, kw_only=True)
class Features:
    """Feature columns of one recommender, in the order of files and tensors.

    A valid name has 1 to `MAX_NAME` printable characters, no slash, and no space at its start or
    end.

    Raises:
        ContractError: there is no feature, there are more than `MAX_COLUMNS` columns, a name is
            used twice, or a name is invalid.

    >>> Features(numeric=("price",), categorical=("item", "shop")).names
    ('price', 'item', 'shop')
    """

    numeric: tuple[str, ...]
    """Columns of numbers: float32 in files. Each column is one column of the tensor `dense`, unless
    the feature is `bucketed`."""
    categorical: tuple[str, ...]
    """Columns of categories: int64 from 0 to `MAX_CATEGORY` in files. Each categorical feature is
    one column of the tensor `categorical`."""
    lists: tuple[str, ...] = ()
    """Columns of lists of categories: list<int64> in files. Lists have no null elements. A null
    list is empty. Each list has `ListOptions.max` columns of the tensor `categorical`, after the
    categorical features."""
    numeric_options: Mapping[str, NumericOptions] = field(default_factory=dict)
    """Options by numeric feature. A feature without an entry has the default options."""
    categorical_options: Mapping[str, CategoricalOptions] = field(default_factory=dict)
    """Options by categorical feature. A feature without an entry has the default options."""
    list_options: Mapping[str, ListOptions] = field(default_factory=dict)
    """Options by list. A list without an entry has the default options."""

    def __post_init__(self) -> None:
        """Check the columns, and convert the lists of JSON to tuples."""
        object.__setattr__(self, "numeric", tuple(self.numeric))
        object.__setattr__(self, "categorical", tuple(self.categorical))
        object.__setattr__(self, "lists", tuple(self.lists))
        defaults = {
            "numeric": _NUMERIC_DEFAULTS,
            "categorical": _CATEGORICAL_DEFAULTS,
            "list": _LIST_DEFAULTS,
        }
        for kind, usual in defaults.items():
            options: Mapping[str, object] = getattr(self, f"{kind}_options")
            object.__setattr__(
                self, f"{kind}_options", {n: each for n, each in options.items() if each != usual}
            )
            known = set(getattr(self, "lists" if kind == "list" else kind))
            if unknown := [name for name in options if name not in known]:
                raise ContractError(f"options are given for {unknown}, expected {kind} features")
        if not self.names:
            raise ContractError("there are no features, expected one or more names")
        if wrong := [name for name in self.names if not _is_name(name)]:
            raise ContractError(
                f"features are named {wrong}, expected printable characters without a slash, no "
                "space at either end, "
                f"and at most {MAX_NAME} characters"
            )
        if twice := sorted(name for name, count in Counter(self.names).items() if count > 1):
            raise ContractError(f"features {twice} occur twice, expected each once")
        columns = len(self.numeric + self.categorical) + sum(
            self.list_options_of(name).max for name in self.lists
        )
        if columns > MAX_COLUMNS:
            raise ContractError(
                f"features need {columns:,} tensor columns, expected at most {MAX_COLUMNS:,}: a "
                "list needs "
                "one for each of its positions"
            )
        for name, each in self.list_options.items():
            if each.table is not None and each.table not in self.categorical:
                raise ContractError(
                    f"table of {name} is {each.table!r}, expected a categorical feature"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """Return all features: numeric ones, categorical ones, then lists."""
        return self.numeric + self.categorical + self.lists

    @property
    def columns(self) -> dict[str, list[str]]:
        """Return the column names of the input tensors and of the log records.

        The names are grouped by kind, for JSON. Each position of a list is one column.
        """
        return {"numeric": list(self.numeric), "categorical": list(self.position_names)}

    def options_of(self, name: str) -> NumericOptions:
        """Return the options of the numeric feature `name`."""
        return self.numeric_options.get(name, _NUMERIC_DEFAULTS)

    @property
    def string_features(self) -> tuple[str, ...]:
        """Return the categorical features and the lists whose values are strings.

        See `CategoricalOptions`.
        """
        return tuple(
            name for name in self.categorical + self.lists if self.type_of(name) == "string"
        )

    def type_of(self, name: str) -> str:
        """Return the type of a categorical feature or of a list's elements.

        See `CategoricalOptions`.
        """
        if name in self.lists:
            options = self.list_options_of(name)
            return options.type if options.table is None else self.type_of(options.table)
        return self.categorical_options.get(name, _CATEGORICAL_DEFAULTS).type

    def embed_of(self, name: str) -> int | None:
        """Return the vector length of a feature, which may be categorical, bucketed or a list.

        Returns None if the feature uses the model's default length.
        """
        if name in self.numeric:
            return self.options_of(name).embed
        if name in self.lists:
            options = self.list_options_of(name)
            return options.embed if options.table is None else self.embed_of(options.table)
        return self.categorical_options.get(name, _CATEGORICAL_DEFAULTS).embed

    @property
    def served_as(self) -> dict[int, int]:
        """Return the fixed category of each feature that is served with a fixed value.

        The keys are positions on the categorical axis. See `CategoricalOptions.served_as`.
        """
        values = {name: each.served_as for name, each in self.categorical_options.items()}
        return {
            self.categorical.index(n): category_of(str(v))
            for n, v in values.items()
            if v is not None
        }

    @property
    def needed(self) -> tuple[str, ...]:
        """Return the features that a request must contain.

        Features with a fixed served value may be absent.
        """
        served = {self.categorical[position] for position in self.served_as}
        return tuple(name for name in self.names if name not in served)

    @property
    def slots(self) -> tuple[str, ...]:
        """Return the features that have their own vocabulary and their own rows in the table.

        The categories of a bucketed feature are the numbers of its buckets.
        """
        own_lists = tuple(name for name in self.lists if self.list_options_of(name).table is None)
        return self.categorical + own_lists + self.bucketed

    @property
    def bucketed(self) -> tuple[str, ...]:
        """Return the numeric features that are converted to buckets.

        See `NumericOptions.transform`.
        """
        return tuple(name for name in self.numeric if self.options_of(name).num_buckets)

    @property
    def positions(self) -> FeaturePositions:
        """Return the slot of each position on the categorical axis, and the positions of each list.

        >>> last, tags = ListOptions(max=2, table="item"), ListOptions(max=1, pool="sum")
        >>> names = {"numeric": (), "categorical": ("user", "item"), "lists": ("last", "tags")}
        >>> features = Features(**names, list_options={"last": last, "tags": tags})
        >>> features.positions.slots, [tuple(each) for each in features.positions.lists]
        ((0, 1, 1, 1, 2), [(2, 4, 'mean'), (4, 5, 'sum')])
        """
        slots, lists = list(range(len(self.categorical))), []
        for name in self.lists:
            options = self.list_options_of(name)
            lists.append(PooledPositions(len(slots), len(slots) + options.max, options.pool))
            slots += [self.slots.index(options.table or name)] * options.max
        return FeaturePositions(tuple(slots), tuple(lists))

    @property
    def id_positions(self) -> FeaturePositions:
        """Return `positions` extended by one position for each bucketed feature.

        >>> options = {"price": NumericOptions(transform=("quantile_buckets(8)",))}
        >>> features = Features(numeric=("price",), categorical=("item",), numeric_options=options)
        >>> features.id_positions.slots
        (0, 1)
        """
        slots, lists = self.positions
        return FeaturePositions(
            slots + tuple(range(len(self.slots) - len(self.bucketed), len(self.slots))), lists
        )

    @property
    def id_names(self) -> tuple[str, ...]:
        """Return the name of each column of ids."""
        return self.position_names + self.bucketed

    @property
    def id_features(self) -> tuple[str, ...]:
        """Return the feature of each column of ids."""
        return self.position_features + self.bucketed

    @property
    def vector_names(self) -> tuple[str, ...]:
        """Return the feature of each input vector of a network. A list has one pooled vector."""
        return self.categorical + self.lists + self.bucketed

    @property
    def position_names(self) -> tuple[str, ...]:
        """Return the name of the tensor column at each position of the categorical axis."""
        return self.categorical + tuple(
            column for name in self.lists for column in self.positions_of(name)
        )

    @property
    def position_features(self) -> tuple[str, ...]:
        """Return the name of the feature at each position of the categorical axis."""
        return self.categorical + tuple(
            name for name in self.lists for _ in self.positions_of(name)
        )

    def positions_of(self, name: str) -> tuple[str, ...]:
        """Return the column names of a list (see `_POSITION`), or a categorical feature's name."""
        if name in self.categorical:
            return (name,)
        return tuple(
            _POSITION.format(name=name, number=i) for i in range(self.list_options_of(name).max)
        )

    def list_options_of(self, name: str) -> ListOptions:
        """Return the options of the list `name`."""
        return self.list_options.get(name, _LIST_DEFAULTS)

    @property
    def indicated(self) -> tuple[str, ...]:
        """Return the numeric features that have a missing indicator."""
        return tuple(name for name in self.numeric if self.options_of(name).indicator)

    @property
    def plain_numeric(self) -> list[int]:
        """Return the positions of the numeric features without buckets."""
        bucketed = self.bucketed
        return [i for i, name in enumerate(self.numeric) if name not in bucketed]

    @property
    def dense_inputs(self) -> tuple[str, ...]:
        """Return the names of the dense inputs: numeric features without buckets, then indicators.

        >>> options = {"a": NumericOptions(indicator=True)}
        >>> Features(numeric=("a", "b"), categorical=(), numeric_options=options).dense_inputs
        ('a', 'b', 'a/missing')
        """
        return (
            *(self.numeric[i] for i in self.plain_numeric),
            *(INDICATOR.format(name=name) for name in self.indicated),
        )

    def expect_continues(self, before: "Features", *, parent: str) -> None:
        """Refuse to continue the parent's model if its features are incompatible.

        The weights of a column are found by the column's name. Columns may therefore be added,
        removed and reordered.

        Args:
            before: Features of the parent.
            parent: Version of the parent, for the error.

        Raises:
            ContractError: a column has another kind or other options than in the parent, or no
                column of the parent remains.
        """
        common = [name for name in self.names if name in before.names]
        kinds = ("numeric", "categorical", "lists")
        other_kind = [
            n
            for n in common
            if any((n in getattr(self, k)) != (n in getattr(before, k)) for k in kinds)
        ]
        options, options_before = (
            {**each.numeric_options, **each.categorical_options, **each.list_options}
            for each in (self, before)
        )
        other_options = [
            n for n in common if n not in other_kind and options.get(n) != options_before.get(n)
        ]
        differences = {"change the kind of": other_kind, "change the options of": other_options}
        changes = [f"{verb} {names}" for verb, names in differences.items() if names]
        if not common:
            changes = [f"have none of {list(before.names)}"]
        if changes:
            raise ContractError(
                f"features of this run {' and '.join(changes)}, expected those of the parent "
                f"{parent}; to train "
                f"from scratch, {run_again(self._from_scratch(before))}"
            )

    def _from_scratch(self, before: "Features") -> str:
        """Return the flags that start a run from scratch.

        If the champion cannot score rows with these features, the flags also skip the comparison
        with the champion.
        """
        return FROM_SCRATCH if self.missing_columns(before) else "-p parent=none"

    def missing_columns(self, other: "Features") -> list[str]:
        """Return the tensor columns that `other` has and `self` lacks.

        If the options of a list differ in the selected elements, all columns of the list are
        returned.
        """
        missing = [name for name in other.numeric if name not in self.numeric]
        for name, column in zip(other.position_features, other.position_names):
            counted = [
                (each.max, each.keep)
                for each in (self.list_options_of(name), other.list_options_of(name))
            ]
            if column not in self.position_names or (
                name in other.lists and counted[0] != counted[1]
            ):
                missing.append(column)
        return missing

    def joined(self, other: "Features") -> "Features":
        """Return the features of `self` and `other` together.

        Within each kind, the features of `self` come first, then the additional features of
        `other`. If both have a column, the options of `self` apply.

        >>> other = Features(numeric=("c", "a"), categorical=())
        >>> Features(numeric=("a",), categorical=("b",)).joined(other).names
        ('a', 'c', 'b')
        """
        theirs = [name for name in other.names if name not in self.names]

        def options(kind: str) -> dict[str, Any]:
            return {
                **{n: each for n, each in getattr(other, kind).items() if n in theirs},
                **getattr(self, kind),
            }

        return Features(
            numeric=self.numeric + tuple(name for name in other.numeric if name in theirs),
            categorical=self.categorical
            + tuple(name for name in other.categorical if name in theirs),
            lists=self.lists + tuple(name for name in other.lists if name in theirs),
            numeric_options=options("numeric_options"),
            categorical_options=options("categorical_options"),
            list_options=options("list_options"),
        )


def _is_name(name: object) -> bool:
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME:
        return False
    return name.isprintable() and name.strip() == name and "/" not in name
