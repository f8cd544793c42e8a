"""The proof that the graph gives raw rows the scores that training gave encoded ones.

Takes the raw held-out rows and the scores that evaluation kept of them (made by preprocessing's encoding and the
training side's network), runs the graph in this process on one thread, and refuses above `TOLERANCE`. A sample of
the rows goes with the version as its golden rows, so that a served model can be probed with them later.
"""

import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evergreen.config.features import MISSING_CATEGORY, Features
from evergreen.config.reader import read_mapping
from evergreen.contracts.manifests import RawDataset, Verdict
from evergreen.contracts.raw_rows import category_matrix, feature_matrix
from evergreen.contracts.serving import MAX_BATCH_ROWS, PROBABILITY_OUTPUT, named_inputs
from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import ContractError, first_line
from evergreen.runtime.onnx_runtime import silent_onnxruntime
from evergreen.storage.uris import local_path

TOLERANCE = 1e-5
"""Largest accepted difference of one probability."""
MAX_ROWS = 20_000
"""Held-out rows compared, from the oldest."""
NUM_GOLDEN_ROWS = 64
_ARRAYS = ("dense", "categorical", "expected")
_FEATURES = "features"
"""Name, in the file of golden rows, of their features as JSON."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GoldenRows:
    """Raw rows with the probabilities that the training side gave them."""

    features: Features
    """What the columns are."""
    dense: NDArray[np.float32]
    """[n, d], NaN = missing."""
    categorical: NDArray[np.int64]
    """[n, `Features.places`], `MISSING_CATEGORY` = missing."""
    expected: NDArray[np.float32]
    """[n]."""

    def __len__(self) -> int:
        return len(self.expected)

    def sample(self, num_rows: int = NUM_GOLDEN_ROWS) -> "GoldenRows":
        """At most `num_rows` of the rows, spread evenly."""
        return self.take(np.unique(np.linspace(0, len(self) - 1, min(num_rows, len(self))).astype(np.int64)))

    def take(self, at: NDArray[np.int64] | slice) -> "GoldenRows":
        """The rows at these positions."""
        arrays = {name: getattr(self, name)[at] for name in _ARRAYS}
        return GoldenRows(features=self.features, **arrays)

    def values(self, row: int) -> dict[str, float | int | None]:
        """The raw values of a row by column; None = missing."""
        dense, categorical = self.dense[row].tolist(), self.categorical[row].tolist()
        found = {name: None if np.isnan(value) else value for name, value in zip(self.features.numeric, dense)}
        return found | {
            name: None if value == MISSING_CATEGORY else value
            for name, value in zip(self.features.place_names, categorical)
        }

    def save(self, path: Path) -> None:
        """Writes the rows to `path`."""
        content = io.BytesIO()
        arrays: dict[str, Any] = {name: getattr(self, name) for name in _ARRAYS}
        arrays[_FEATURES] = np.array(json.dumps(asdict(self.features)))
        np.savez(content, **arrays)
        write_whole(path, content.getvalue())

    @classmethod
    def load(cls, path: Path) -> "GoldenRows":
        """The rows in `path`.

        Raises:
            ContractError: the file is absent or damaged, or its arrays are no rows.
        """
        arrays = _read_arrays(path, "golden rows", (*_ARRAYS, _FEATURES))
        try:
            features = read_mapping(Features, json.loads(str(arrays.pop(_FEATURES))), path=_FEATURES)
        except (ValueError, TypeError) as error:
            raise ContractError(f"golden rows {path} have no features: {first_line(error)}") from error
        found = {name: (str(array.dtype), array.shape) for name, array in arrays.items()}
        num_rows = arrays["expected"].size
        expected = {
            "dense": ("float32", (num_rows, len(features.numeric))),
            "categorical": ("int64", (num_rows, len(features.place_names))),
            "expected": ("float32", (num_rows,)),
        }
        if found != expected or num_rows == 0:
            raise ContractError(f"golden rows {path} are {found}, expected {expected}, at least one row")
        return cls(features=features, **arrays)


def _read_arrays(path: Path, what: str, names: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    """The arrays `names` in the .npz `path`, which errors call `what`."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names}
    except Exception as error:  # A damaged archive fails as NumPy, zipfile or zlib find it, in a dozen types.
        raise ContractError(f"{what} {path} cannot be read: {first_line(error)}") from error


def read_held_out(raw: RawDataset, verdict: Verdict, *, max_rows: int = MAX_ROWS) -> GoldenRows:
    """The first `max_rows` held-out rows beside their training-side scores.

    Raises:
        ContractError: there are no rows, or rows and scores do not belong together.
    """
    from evergreen.rows.archived_rows import parquet_file, reading_parquet

    path = local_path(verdict.scores_uri)
    scores = _read_arrays(path, "scores", ("candidate",))["candidate"].astype(np.float32).ravel()
    if len(scores) != raw.num_holdout_rows or len(scores) == 0:
        raise ContractError(
            f"scores {path} hold {len(scores)} rows, expected the {raw.num_holdout_rows} held-out rows, at least 1"
        )
    features = raw.recommender.features
    dense, categorical, count = [], [], 0
    for file in sorted(local_path(raw.holdout_uri).glob("*.parquet")):
        with reading_parquet(file), parquet_file(file) as rows:
            for batch in rows.iter_batches(columns=list(features.names)):
                dense.append(feature_matrix(batch, features.numeric, "float32", missing=np.nan))
                categorical.append(category_matrix(batch, features))
                count += batch.num_rows
        if count >= max_rows:
            break
    if count < min(len(scores), max_rows):
        raise ContractError(f"held-out rows in {raw.holdout_uri} are {count}, expected {len(scores)} as scored")
    taken = min(len(scores), max_rows)
    rows = GoldenRows(
        features=features, dense=np.concatenate(dense), categorical=np.concatenate(categorical), expected=scores
    )
    return rows.take(slice(taken))


def open_graph(graph: Path) -> Any:
    """An ONNX Runtime session on one thread, as the served model opens it.

    Args:
        graph: A `model.onnx`, with `model.data` beside it if its tables lie there.

    Raises:
        ContractError: ONNX Runtime refuses the graph, or `model.data` is absent or too short. Damage that changes no
            size is for the graph's hash to notice (`registry.models.graph_sha256`).
    """
    onnxruntime = silent_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    try:
        return onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's exceptions share no base class but this one.
        raise ContractError(f"graph {graph} cannot be opened: {first_line(error)}") from error


def score(session: Any, rows: GoldenRows, *, batch_rows: int = MAX_BATCH_ROWS) -> NDArray[np.float32]:
    """The graph's probabilities [n] of `rows`, `batch_rows` at a time."""
    parts = [np.zeros(0, np.float32)]
    for start in range(0, len(rows), batch_rows):
        part = slice(start, start + batch_rows)
        inputs = named_inputs(rows.dense[part], rows.categorical[part])
        parts.append(session.run([PROBABILITY_OUTPUT.name], inputs)[0].ravel())
    return np.concatenate(parts)


def prove_parity(session: Any, rows: GoldenRows) -> float:
    """The largest difference between the graph and the expected scores of `rows`.

    Also scores a sample row by row: how a batch is cut must not change an answer.

    Raises:
        ContractError: a difference is above `TOLERANCE`, or not a number; names the row and its values.
    """
    largest = check_scores(score(session, rows), rows, source="graph")
    sample = rows.sample()
    for batch_rows in (1, 7):
        check_scores(score(session, sample, batch_rows=batch_rows), sample, source="graph in parts")
    return largest


def check_scores(scores: NDArray[np.float32], rows: GoldenRows, *, source: str) -> float:
    """The largest difference between `scores` and what `rows` expect.

    Raises:
        ContractError: as `prove_parity`; `source` is named.
    """
    if scores.shape != rows.expected.shape:
        raise ContractError(f"{source} gave scores of shape {scores.shape}, expected {rows.expected.shape}")
    differences = np.abs(scores.astype(np.float64) - rows.expected.astype(np.float64))
    # NaN must lose: it compares false with every tolerance.
    worst = int(np.argmax(np.where(np.isnan(differences), np.inf, differences)))
    if not differences[worst] <= TOLERANCE:
        got, expected = scores[worst], rows.expected[worst]
        raise ContractError(
            f"{source} differs from the training-side score by {differences[worst]:.3g} at row {worst} "
            f"({got:.7f} instead of {expected:.7f}), expected at most {TOLERANCE:g}; the row is {rows.values(worst)}"
        )
    return float(differences[worst])
