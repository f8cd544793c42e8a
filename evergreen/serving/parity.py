"""Check that the graph computes the same scores from raw rows as training from encoded rows.

The input is the raw holdout rows and the scores that evaluation stored for them. Evaluation
computed these scores with the network of the training code, from rows that preprocessing had
encoded. The graph runs in this process on one thread, and a difference above `TOLERANCE` is an
error. A sample of the rows becomes the version's golden rows, with which the served model is probed
later.
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
"""Maximum number of compared holdout rows, oldest first."""
NUM_GOLDEN_ROWS = 64
_ARRAYS = ("dense", "categorical", "expected")
_FEATURES = "features"
"""Name of the features' JSON in the file of golden rows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GoldenRows:
    """Raw rows, and the probabilities that training computed for them."""

    features: Features
    """Features of the recommender, which describe the columns."""
    dense: NDArray[np.float32]
    """[n, d], NaN = missing."""
    categorical: NDArray[np.int64]
    """[n, `Features.positions`], `MISSING_CATEGORY` = missing."""
    expected: NDArray[np.float32]
    """[n] probabilities."""

    def __len__(self) -> int:
        return len(self.expected)

    def sample(self, num_rows: int = NUM_GOLDEN_ROWS) -> "GoldenRows":
        """Return at most `num_rows` of the rows, evenly spaced."""
        return self.take(
            np.unique(np.linspace(0, len(self) - 1, min(num_rows, len(self))).astype(np.int64))
        )

    def take(self, at: NDArray[np.int64] | slice) -> "GoldenRows":
        """Return the rows at these positions."""
        arrays = {name: getattr(self, name)[at] for name in _ARRAYS}
        return GoldenRows(features=self.features, **arrays)

    def values(self, row: int) -> dict[str, float | int | None]:
        """Return the raw values of one row by column. None = missing."""
        dense, categorical = self.dense[row].tolist(), self.categorical[row].tolist()
        found = {
            name: None if np.isnan(value) else value
            for name, value in zip(self.features.numeric, dense)
        }
        return found | {
            name: None if value == MISSING_CATEGORY else value
            for name, value in zip(self.features.position_names, categorical)
        }

    def save(self, path: Path) -> None:
        """Write the rows to `path`."""
        content = io.BytesIO()
        arrays: dict[str, Any] = {name: getattr(self, name) for name in _ARRAYS}
        arrays[_FEATURES] = np.array(json.dumps(asdict(self.features)))
        np.savez(content, **arrays)
        write_whole(path, content.getvalue())

    @classmethod
    def load(cls, path: Path) -> "GoldenRows":
        """Read the rows in `path`.

        Raises:
            ContractError: the file is absent or corrupt, or its arrays do not have the types and
                shapes of golden rows.
        """
        arrays = _read_arrays(path, "golden rows", (*_ARRAYS, _FEATURES))
        try:
            features = read_mapping(
                Features, json.loads(str(arrays.pop(_FEATURES))), path=_FEATURES
            )
        except (ValueError, TypeError) as error:
            raise ContractError(
                f"golden rows {path} have no features: {first_line(error)}"
            ) from error
        found = {name: (str(array.dtype), array.shape) for name, array in arrays.items()}
        num_rows = arrays["expected"].size
        expected = {
            "dense": ("float32", (num_rows, len(features.numeric))),
            "categorical": ("int64", (num_rows, len(features.position_names))),
            "expected": ("float32", (num_rows,)),
        }
        if found != expected or num_rows == 0:
            raise ContractError(
                f"golden rows {path} are {found}, expected {expected}, at least one row"
            )
        return cls(features=features, **arrays)


def _read_arrays(path: Path, what: str, names: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    """Read the named arrays from the .npz file `path`.

    `what` is the name of the file in error messages.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names}
    except Exception as error:  # a corrupt archive raises various errors of NumPy, zipfile or zlib
        raise ContractError(f"{what} {path} cannot be read: {first_line(error)}") from error


def read_held_out(raw: RawDataset, verdict: Verdict, *, max_rows: int = MAX_ROWS) -> GoldenRows:
    """Return the first `max_rows` holdout rows with their scores from evaluation.

    Raises:
        ContractError: there are no rows, or the numbers of rows and scores differ.
    """
    from evergreen.rows.archived_rows import parquet_file, reading_parquet

    path = local_path(verdict.scores_uri)
    scores = _read_arrays(path, "scores", ("candidate",))["candidate"].astype(np.float32).ravel()
    if len(scores) != raw.num_holdout_rows or len(scores) == 0:
        raise ContractError(
            f"scores {path} hold {len(scores)} rows, expected {raw.num_holdout_rows} as in the "
            "holdout, and at least 1"
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
        raise ContractError(
            f"{raw.holdout_uri} has {count} holdout rows, expected {len(scores)} as in the scores"
        )
    taken = min(len(scores), max_rows)
    rows = GoldenRows(
        features=features,
        dense=np.concatenate(dense),
        categorical=np.concatenate(categorical),
        expected=scores,
    )
    return rows.take(slice(taken))


def open_graph(graph: Path) -> Any:
    """Open an ONNX Runtime session on one thread, as the served model does.

    Args:
        graph: Path of `model.onnx`. If the graph has external tables, `model.data` must be in the
            same folder.

    Raises:
        ContractError: ONNX Runtime rejects the graph, or `model.data` is absent or too short.
            Corruption that keeps the size is detected only by the graph's hash
            (`evergreen.registry.models.graph_sha256`).
    """
    onnxruntime = silent_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    try:
        return onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's exceptions have no other common base class
        raise ContractError(f"graph {graph} cannot be opened: {first_line(error)}") from error


def score(
    session: Any, rows: GoldenRows, *, batch_rows: int = MAX_BATCH_ROWS
) -> NDArray[np.float32]:
    """Return the graph's probabilities [n] of `rows`, computed in batches of `batch_rows`."""
    parts = [np.zeros(0, np.float32)]
    for start in range(0, len(rows), batch_rows):
        part = slice(start, start + batch_rows)
        inputs = named_inputs(rows.dense[part], rows.categorical[part])
        parts.append(session.run([PROBABILITY_OUTPUT.name], inputs)[0].ravel())
    return np.concatenate(parts)


def prove_parity(session: Any, rows: GoldenRows) -> float:
    """Return the largest difference between the graph's scores and the expected scores of `rows`.

    A sample is also scored in smaller batches, because the batch size must not change a score.

    Raises:
        ContractError: a difference is above `TOLERANCE` or is NaN. The message contains the row and
            its values.
    """
    largest = check_scores(score(session, rows), rows, source="graph")
    sample = rows.sample()
    for batch_rows in (1, 7):
        check_scores(
            score(session, sample, batch_rows=batch_rows), sample, source="graph in small batches"
        )
    return largest


def check_scores(scores: NDArray[np.float32], rows: GoldenRows, *, source: str) -> float:
    """Return the largest difference between `scores` and the expected scores of `rows`.

    Raises:
        ContractError: See `prove_parity`. The message begins with `source`.
    """
    if scores.shape != rows.expected.shape:
        raise ContractError(
            f"{source} gave scores of shape {scores.shape}, expected {rows.expected.shape}"
        )
    differences = np.abs(scores.astype(np.float64) - rows.expected.astype(np.float64))
    # NaN compares false with every tolerance, and must count as the worst difference.
    worst = int(np.argmax(np.where(np.isnan(differences), np.inf, differences)))
    if not differences[worst] <= TOLERANCE:
        got, expected = scores[worst], rows.expected[worst]
        raise ContractError(
            f"{source} differs from the training-side score by {differences[worst]:.3g} at row "
            f"{worst} ({got:.7f} instead of {expected:.7f}), expected at most {TOLERANCE:g}; the "
            f"row is {rows.values(worst)}"
        )
    return float(differences[worst])
