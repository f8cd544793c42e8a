"""What a model's training rows looked like, column by column: what the monitor measures drift against.

Joins validation, which counts the rows of its run's window, and evaluation, which counts the candidate's scores of the
held-out rows, to the monitor, which compares what is served. Two JSON files, found by the model's id:
`<model>/statistics/reference.json` (`manifests.Model.REFERENCE`) and `<store>/verdicts/<model>/scores.json`.

An incremental run's statistics are those of its own window, not merged with its parent's, as validation's TFDV
statistics are. Merged ones would keep every distribution that ever was, and alarm again on a change that is learnt.

Dense columns are counted between fixed edges (TFDV's own buckets do not carry a comparison of Criteo's integers; see
`components.validation.tfdv_statistics`). The ends of a column are set apart by whole buckets: what lies outside `inner`
is an outlier, so that outliers and the rest are counted by the same counts.

The rows come in two halves, block by block. One chooses which values are listed and where outliers begin; only the
other is a fair sample of the cells so chosen (`fair_counts`). In the half that chose, listed values are more frequent
than they are, by luck, and the others rarer: measured on 20,000 rows that did both, a chi-square test at 5 % called
73 % of the stationary buckets drift in a column of 20,000 values, and all in one of 1,500.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.contracts.criteo import CATEGORICAL, DENSE
from components.runtime.durable import write_whole
from components.runtime.errors import ContractError

FORMAT_VERSION = 1
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
    def of(cls, choosing: Counts, fair: Counts, missing: int) -> DenseColumn:
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
    """I1..I13, in column order."""
    categorical: dict[str, CategoryColumn]
    """C1..C26, in column order."""
    scores: ScoreHistogram | None = None
    """None where evaluation kept none: a model older than the file, or one that was never judged."""
    excluded: tuple[str, ...] = ()
    """Features that the model does not use: not counted, so missing in all rows here, and not to be judged."""

    def write(self, path: Path) -> None:
        """Writes all but the scores to `path`, whole or not at all; the same statistics give the same bytes."""
        head = {"kind": "ReferenceStatistics", "format_version": FORMAT_VERSION, "rows": self.rows}
        lines = [json.dumps({**head, "excluded": list(self.excluded)})[1:-1]]
        lines.append(f'"dense_edges": {_dumps(self.dense_edges)}')
        lines.append(f'"dense": {_dumps_by_name(self.dense)}')
        lines.append(f'"categorical": {_dumps_by_name(self.categorical)}')
        write_whole(path, "{" + ",\n".join(lines) + "}\n")


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoreHistogram:
    """A model's scores of the held-out rows."""

    edges: NDArray[np.float64]
    counts: Counts

    @classmethod
    def of(cls, scores: NDArray[Any]) -> ScoreHistogram:
        """Of probabilities [n]."""
        return cls(edges=SCORE_EDGES, counts=count_between(SCORE_EDGES, scores))

    def write(self, path: Path) -> None:
        """Writes the histogram to `path`, whole or not at all."""
        head = {"kind": "ScoreHistogram", "format_version": FORMAT_VERSION}
        write_whole(path, _dumps({**head, "edges": self.edges.tolist(), "counts": self.counts.tolist()}) + "\n")


def read_reference(path: Path, *, scores: Path | None = None) -> ReferenceStatistics:
    """The statistics in `path`, with the histogram in the file `scores` where one is named and exists.

    Raises:
        ContractError: a file cannot be read, is of another kind or version, or its counts do not fit together.
    """
    document = _read_document(path, "ReferenceStatistics")
    try:
        edges = np.array(document["dense_edges"], np.float64)
        found = ReferenceStatistics(
            rows=int(document["rows"]),
            dense_edges=edges,
            dense={name: _dense(document["dense"][name]) for name in DENSE},
            categorical={name: _categorical(document["categorical"][name]) for name in CATEGORICAL},
            scores=_read_scores(scores) if scores is not None and scores.exists() else None,
            excluded=tuple(document.get("excluded", ())),
        )
    except (KeyError, TypeError, OverflowError, ValueError) as error:
        raise ContractError(f"{path} is no reference statistics: {error!r}") from error
    _expect_edges(path, edges)
    _expect_counts(path, found)
    return found


def _expect_counts(path: Path, found: ReferenceStatistics) -> None:
    edges = found.dense_edges
    for name, column in found.dense.items():
        first, end = column.inner
        for counts in (column.counts, column.fair_counts):
            _check_statistic(path, name, counts.shape == (len(edges) - 1,), expected=f"{len(edges) - 1} counts")
        _expect_part(path, name, column.fair_counts, whole=column.counts)
        _check_statistic(path, name, 0 <= first <= end < len(edges), expected="an inner range within its buckets")
        _expect_rows(
            path, name, int(column.counts.sum()), missing=column.missing, counts=column.counts, rows=found.rows
        )
    for name, category in found.categorical.items():
        for counts in (category.counts, category.fair_counts):
            fits = category.values.ndim == 1 and category.values.shape == counts.shape
            _check_statistic(path, name, fits, expected="a count for each value")
        _expect_part(path, name, category.fair_counts, whole=category.counts)
        _check_statistic(
            path, name, 0 <= category.fair_others <= category.others, expected="fair counts within all counts"
        )
        _check_statistic(
            path, name, len(np.unique(category.values)) == len(category.values), expected="each value once"
        )
        listed = int(category.counts.sum())
        _expect_rows(
            path, name, listed + category.others, missing=category.missing, counts=category.counts, rows=found.rows
        )


def _read_scores(path: Path) -> ScoreHistogram:
    document = _read_document(path, "ScoreHistogram")
    try:
        edges, counts = np.array(document["edges"], np.float64), np.array(document["counts"], np.int64)
    except (KeyError, TypeError, OverflowError, ValueError) as error:
        raise ContractError(f"{path} is no score histogram: {error!r}") from error
    _expect_edges(path, edges)
    _check_statistic(path, "score", counts.shape == (len(edges) - 1,), expected=f"{len(edges) - 1} counts")
    _check_statistic(path, "score", bool((counts >= 0).all()), expected="no negative count")
    return ScoreHistogram(edges=edges, counts=counts)


def _read_document(path: Path, kind: str) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise ContractError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ContractError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("kind") != kind:
        raise ContractError(f"{path} is no {kind}")
    if document.get("format_version") != FORMAT_VERSION:
        raise ContractError(f"{path} has format_version {document.get('format_version')}, expected {FORMAT_VERSION}")
    return document


def _dense(document: dict[str, Any]) -> DenseColumn:
    first, end = document["inner"]
    counts = np.array(document["counts"], np.int64)
    fair = np.array(document["fair_counts"], np.int64)
    return DenseColumn(counts=counts, fair_counts=fair, missing=int(document["missing"]), inner=(int(first), int(end)))


def _categorical(document: dict[str, Any]) -> CategoryColumn:
    return CategoryColumn(
        values=np.array(document["values"], np.int64),
        counts=np.array(document["counts"], np.int64),
        others=int(document["others"]),
        fair_counts=np.array(document["fair_counts"], np.int64),
        fair_others=int(document["fair_others"]),
        missing=int(document["missing"]),
    )


def _expect_edges(path: Path, edges: NDArray[np.float64]) -> None:
    _check_statistic(
        path,
        "edges",
        edges.ndim == 1 and len(edges) > 2 and bool((np.diff(edges) > 0).all()),
        expected="ascending numbers",
    )


def _expect_rows(path: Path, name: str, present: int, *, missing: int, counts: Counts, rows: int) -> None:
    _check_statistic(path, name, missing >= 0 and bool((counts >= 0).all()), expected="no negative count")
    _check_statistic(path, name, present + missing == rows, expected=f"{rows} rows, values and missing ones together")


def _expect_part(path: Path, name: str, part: Counts, *, whole: Counts) -> None:
    _check_statistic(path, name, bool(((part >= 0) & (part <= whole)).all()), expected="fair counts within all counts")


def _check_statistic(path: Path, name: str, holds: bool, *, expected: str) -> None:
    if not holds:
        raise ContractError(f"{path}: {name} is damaged, expected {expected}")


def _dumps(value: Any) -> str:
    return json.dumps(value.tolist() if isinstance(value, np.ndarray) else value, separators=(",", ":"))


def _dumps_by_name(columns: dict[str, Any]) -> str:
    """A JSON object with one line per column: readable, and a tenth of the lines that an indent would give."""
    plain = {
        name: {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in vars(column).items()}
        for name, column in columns.items()
    }
    return "{" + ",".join(f"\n {json.dumps(name)}: {_dumps(column)}" for name, column in plain.items()) + "}"
