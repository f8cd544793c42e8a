"""What a model's training rows looked like, column by column: what the monitor measures drift against.

Joins validation, which counts the rows of its run's window, and evaluation, which counts the candidate's scores of the
held-out rows, to the monitor, which compares what is served. Two JSON files, found by the model's id:
`<model>/statistics/reference.json` (`manifests.Model.REFERENCE`) and `<store>/verdicts/<model>/scores.json`.

An incremental run's statistics are those of its own window, not merged with its parent's, as validation's TFDV
statistics are. Merged ones would keep every distribution that ever was, and alarm again on a change that is learned.

A list is two columns here: its elements, each counted as if it were a row, under the list's name, and how many a row
has under another (`features.LENGTH`). Elements beyond `ListOptions.max` do not count.

Dense columns are counted between fixed edges (TFDV's own buckets do not carry a comparison of Criteo's integers; see
`components.validation.tfdv_statistics`). The ends of a column are set apart by whole buckets: what lies outside `inner`
is an outlier, so that outliers and the rest are counted by the same counts.

The rows come in two halves, block by block. One chooses which values are listed and where outliers begin; only the
other is a fair sample of the cells so chosen (`fair_counts`). In the half that chose, listed values are more frequent
than they are, by luck, and the others rarer: measured on 20,000 rows that did both, a chi-square test at 5 % called
73 % of the stationary buckets drift in a column of 20,000 values, and all in one of 1,500.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.config.features import LENGTH, Features, ListOptions
from components.contracts.manifests import checksummed, parse_document, read_content
from components.runtime.durable import write_whole
from components.runtime.errors import ContractError

FORMAT_VERSION = 2
LISTED_VALUES = 1000
"""Most values listed of a categorical column; TFDV's rank histogram in validation holds as many."""
OUTLIER_SHARE = 0.001
"""Most values, as a share, that a column's outliers may be at either end of the training rows."""

Counts = NDArray[np.int64]


def _make_dense_edges() -> NDArray[np.float64]:
    limit = 1e12
    small = np.arange(-3.5, 11)
    growing = 10.5 * 1.3 ** np.arange(1, 97)
    return np.concatenate([[-limit], small, growing[growing < limit], [limit]])


def _make_score_edges() -> NDArray[np.float64]:
    logits = np.arange(-10.0, 10.25, 0.25)
    return np.concatenate([[0.0], 1 / (1 + np.exp(-logits)), [1.0]])


DENSE_EDGES = _make_dense_edges()
"""One bucket per integer from -3 to 10, then buckets that grow by 30 %; the outer two take the rest, infinity too."""
SCORE_EDGES = _make_score_edges()
"""Steps of a quarter in the logit from -10 to 10: at a click rate of 0.1 % scores differ by factors, not by amounts."""


def count_between(edges: NDArray[np.float64], values: NDArray[Any]) -> Counts:
    """How many of `values` [n] lie in each bucket, [len(edges) - 1]; NaN in none, what is outside in an outer one.

    >>> count_between(np.array([0.0, 1.0, 2.0]), np.array([-5.0, 1.0, 1.5, np.nan])).tolist()
    [1, 2]
    """
    return np.bincount(bucket_of(edges, values[~np.isnan(values)]), minlength=len(edges) - 1)


def bucket_of(edges: NDArray[np.float64], values: NDArray[Any]) -> NDArray[np.int64]:
    """The bucket of each value, of `values`' shape: from an edge up to below the next; NaN gets the last bucket."""
    return np.searchsorted(edges[1:-1], values, side="right")


@dataclass(frozen=True, kw_only=True, eq=False)
class DenseColumn:
    """A dense column's training values."""

    counts: Counts
    """Values per bucket, outliers too; [len(edges) - 1]."""
    fair_counts: Counts
    """The same of the rows that did not choose `inner`."""
    missing: int
    inner: tuple[int, int]
    """First bucket without outliers, and the first after it that holds some again; equal where there are no values."""

    @classmethod
    def of(cls, choosing: Counts, fair: Counts, missing: int) -> "DenseColumn":
        """The column of two halves; outliers are up to `OUTLIER_SHARE` of the choosing one's values at either end."""
        total, inner = int(choosing.sum()), (0, 0)
        if total:
            below, above = np.cumsum(choosing), np.cumsum(choosing[::-1])
            first = int(np.searchsorted(below, OUTLIER_SHARE * total, side="right"))
            inner = (first, len(choosing) - int(np.searchsorted(above, OUTLIER_SHARE * total, side="right")))
        return cls(counts=choosing + fair, fair_counts=fair, missing=missing, inner=inner)


@dataclass(frozen=True, kw_only=True, eq=False)
class CategoryColumn:
    """A categorical column's training values: the most frequent ones, and the others as one."""

    values: NDArray[np.int64]
    """[k] most frequent first, ties by value, in the half that chose them."""
    counts: Counts
    """[k] rows of each."""
    others: int
    """Rows with a value that is not listed."""
    fair_counts: Counts
    """[k] rows of each in the half that did not choose."""
    fair_others: int
    missing: int


@dataclass(frozen=True, kw_only=True, eq=False)
class ReferenceStatistics:
    """A model's training statistics."""

    rows: int
    dense_edges: NDArray[np.float64]
    dense: dict[str, DenseColumn]
    """By numeric feature, in their order, then the lengths of lists."""
    categorical: dict[str, CategoryColumn]
    """By categorical feature, in their order, then the elements of lists, of which none is missing."""
    lists: dict[str, int] = field(default_factory=dict)
    """Places of each list in a row of categories, in their order."""
    scores: "ScoreHistogram | None" = None
    """None where evaluation kept none: a model older than the file, or one that was never judged."""
    excluded: tuple[str, ...] = ()
    """Features that the model does not use: not counted, so missing in all rows here, and not to be judged."""

    @property
    def features(self) -> Features:
        """Of the training rows; of the options, only the places of lists."""
        lengths = [LENGTH.format(name=name) for name in self.lists]
        return Features(
            numeric=tuple(name for name in self.dense if name not in lengths),
            categorical=tuple(name for name in self.categorical if name not in self.lists),
            lists=tuple(self.lists),
            list_options={name: ListOptions(max=places) for name, places in self.lists.items()},
        )

    def write(self, path: Path) -> None:
        """Writes all but the scores to `path`, whole or not at all; the same statistics give the same bytes."""
        content = {
            "rows": self.rows,
            "excluded": self.excluded,
            "dense_edges": self.dense_edges,
            "dense": {name: vars(column) for name, column in self.dense.items()},
            "categorical": {name: vars(column) for name, column in self.categorical.items()},
            "lists": self.lists,
        }
        _write_document(path, "ReferenceStatistics", content)


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoreHistogram:
    """A model's scores of the held-out rows."""

    edges: NDArray[np.float64]
    counts: Counts

    @classmethod
    def of(cls, scores: NDArray[Any]) -> "ScoreHistogram":
        """Of probabilities [n]."""
        return cls(edges=SCORE_EDGES, counts=count_between(SCORE_EDGES, scores))

    def write(self, path: Path) -> None:
        """Writes the histogram to `path`, whole or not at all."""
        _write_document(path, "ScoreHistogram", vars(self))


def read_reference(path: Path, *, scores: Path | None = None) -> ReferenceStatistics:
    """The statistics in `path`, with the histogram in the file `scores` where one is named and exists.

    Raises:
        ContractError: a file cannot be read, is of another kind or version, or its counts do not fit together.
    """
    document = _read_document(path, "ReferenceStatistics")
    try:
        found = ReferenceStatistics(
            rows=document["rows"],
            dense_edges=np.array(document["dense_edges"], np.float64),
            dense={
                name: DenseColumn(**{**_arrays(column), "inner": tuple(column["inner"])})
                for name, column in document["dense"].items()
            },
            categorical={name: CategoryColumn(**_arrays(column)) for name, column in document["categorical"].items()},
            lists=dict(document["lists"]),
            scores=_read_scores(scores) if scores is not None and scores.exists() else None,
            excluded=tuple(document["excluded"]),
        )
        _check_counts(found)
    except (AttributeError, KeyError, TypeError, OverflowError, ValueError) as error:
        raise ContractError(f"{path} is no reference statistics: {error!r}") from error
    return found


def _check_counts(found: ReferenceStatistics) -> None:
    """Raises ValueError unless the counts of every column are those of all rows."""
    for name, column in found.dense.items():
        if not len(column.counts) == len(column.fair_counts) == len(found.dense_edges) - 1:
            raise ValueError(f"{name} has {len(column.counts)} counts, expected {len(found.dense_edges) - 1}")
        if column.counts.sum() + column.missing != found.rows:
            raise ValueError(f"counts of {name} are not those of {found.rows} rows")
    for name, category in found.categorical.items():
        if not len(category.values) == len(category.counts) == len(category.fair_counts):
            raise ValueError(f"{name} has {len(category.values)} values, expected a count for each")
        if name not in found.lists and category.counts.sum() + category.others + category.missing != found.rows:
            raise ValueError(f"counts of {name} are not those of {found.rows} rows")


def _read_scores(path: Path) -> ScoreHistogram:
    document = _read_document(path, "ScoreHistogram")
    histogram = ScoreHistogram(
        edges=np.array(document["edges"], np.float64), counts=np.array(document["counts"], np.int64)
    )
    if len(histogram.counts) != len(histogram.edges) - 1:
        raise ValueError(f"{path} has {len(histogram.counts)} counts, expected {len(histogram.edges) - 1}")
    return histogram


def _arrays(column: dict[str, Any]) -> dict[str, Any]:
    return {name: np.array(value, np.int64) if isinstance(value, list) else value for name, value in column.items()}


def _write_document(path: Path, kind: str, content: dict[str, Any]) -> None:
    document = {"kind": kind, "format_version": FORMAT_VERSION, **content}
    plain = json.loads(json.dumps(document, default=np.ndarray.tolist))
    write_whole(path, json.dumps(checksummed(plain), separators=(",", ":")) + "\n")


def _read_document(path: Path, kind: str) -> dict[str, Any]:
    return parse_document(read_content(path), kind=kind, version=FORMAT_VERSION, source=str(path))
