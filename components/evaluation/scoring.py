"""Score the held-out rows with the candidate's weights and with the champion's served graph.

The rows are stored in two folders in the same order: raw as they were logged, and encoded for the
candidate. Counts and labels of both folders are compared, because scores of different rows must
never be mixed.

The champion scores raw rows through its ONNX graph, exactly as in production. The graph contains
the champion's own feature workflow. `gate` compares the scores.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evergreen.config.data import WEIGHT, ColumnNames
from evergreen.config.features import MISSING_CATEGORY, Features
from evergreen.config.model import config_from_document
from evergreen.config.release import served_tables
from evergreen.contracts.hugectr_folder import FILE_LIST, listed_files
from evergreen.contracts.manifests import Model, Release
from evergreen.contracts.raw_rows import (
    EVENT_TIME,
    LABEL,
    POSITION,
    REQUEST_ID,
    category_matrix,
    feature_matrix,
)
from evergreen.contracts.serving import PROBABILITY_OUTPUT, ColumnMap, named_inputs
from evergreen.contracts.workflow import OOV_ID, FeatureWorkflow
from evergreen.registry.models import graph_sha256, model_in, verified_part
from evergreen.rows.archived_rows import parquet_file, reading_parquet
from evergreen.runtime.errors import ContractError
from evergreen.runtime.onnx_runtime import silent_onnxruntime
from evergreen.storage.uris import local_path

logger = logging.getLogger(__name__)

_BATCH_ROWS = 8192


class RawBatch(NamedTuple):
    """Raw rows in the form that production requests have."""

    labels: NDArray[np.int8]
    event_seconds: NDArray[np.float64]
    """Event times, seconds since the epoch."""
    requests: NDArray[np.int64]
    """Request of each row. Requests are numbered from 0 in the order of the folder."""
    positions: NDArray[np.int32]
    """Position in the ranked list, from 1. 0 if the row belongs to no list."""
    dense: NDArray[np.float32]
    """Numeric values, [n, d]. Missing values are NaN."""
    categorical: NDArray[np.int64]
    """Categories, [n, `Features.positions`]. Missing categories are `MISSING_CATEGORY`."""
    weights: NDArray[np.float32]
    """Sample weights. All ones if rows have no weights."""


class EncodedBatch(NamedTuple):
    """Encoded rows."""

    labels: NDArray[np.int8]
    dense: NDArray[np.float32]
    """Normalised numeric values, [n, d]."""
    ids: NDArray[np.int64]
    """Slot-local ids, [n, `Features.id_positions`]."""


NEW_ITEM, UNKNOWN_ITEM = 1, 2
"""Newness of an item: its id was assigned in this run, or it has no id of its own."""

ScoreEncoded = Callable[[EncodedBatch], NDArray[np.float32]]
ScoreRaw = Callable[[RawBatch], NDArray[np.float32]]


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoredHoldout:
    """The held-out rows with their scores. Arrays have shape [n], in row order."""

    labels: NDArray[np.int8]
    event_seconds: NDArray[np.float64]
    requests: NDArray[np.int64]
    """Request of each row. Requests are numbered from 0."""
    users: NDArray[np.int64] | None
    """User of each row, `MISSING_CATEGORY` if unknown. None if the recommender names no user
    column."""
    positions: NDArray[np.int32]
    """Position in the ranked list, from 1. 0 if the row belongs to no list."""
    candidate: NDArray[np.float32]
    champion: NDArray[np.float32] | None
    has_new_category: NDArray[np.bool_]
    """Whether the row has a category whose id was assigned in this run."""
    has_unknown_category: NDArray[np.bool_]
    """Whether the row has a category without an id of its own."""
    item_newness: NDArray[np.int8] | None
    """`NEW_ITEM`, `UNKNOWN_ITEM`, or 0 for an older item. None if the recommender names no item
    column."""
    categories: NDArray[np.int64]
    """[n, `Features.positions`] raw values of the categorical columns and list elements."""
    columns: tuple[str, ...]
    """Column name of each slot. A list column appears once per slot."""
    weights: NDArray[np.float32] | None = None
    """Sample weights. None if the recommender names no weight column."""

    @property
    def groups(self) -> NDArray[np.int64]:
        """Group of dependent rows: the row's user, or its request if the user is unknown."""
        if self.users is None:
            return self.requests
        return np.where(
            self.users == MISSING_CATEGORY, MISSING_CATEGORY - 1 - self.requests, self.users
        )

    def of_rows(self, mask: NDArray[np.bool_]) -> "ScoredHoldout":
        """Return the rows where the `mask` [n] is True."""
        parts: dict[str, Any] = {
            name: of for name, of in vars(self).items() if isinstance(of, np.ndarray)
        }
        return replace(self, **{name: values[mask] for name, values in parts.items()})


def candidate_scorer(model: Model) -> ScoreEncoded:
    """Return a function that scores encoded rows with the candidate, as in production.

    Some features are served as a constant (`CategoricalOptions.served_as`) and have this constant
    here too. The vectors have the number format of `TableSettings`.

    Raises:
        ContractError: The candidate's files are absent, corrupt or of another shape.
    """
    from evergreen.networks.scoring import load_scorer

    scorer = load_scorer(
        verified_part(model, Model.WEIGHTS),
        config_from_document(model.config),
        model.slot_sizes,
        positions=model.recommender.features.id_positions,
        numbers=served_tables(model.recommender),
    )
    served = {}
    if model.recommender.features.served_as:
        served = FeatureWorkflow.load(verified_part(model, Model.WORKFLOW)).served_ids

    def score(batch: EncodedBatch) -> NDArray[np.float32]:
        ids = batch.ids
        for position, one in served.items():
            ids = ids.copy()
            ids[:, position] = one
        scores: NDArray[np.float32] = scorer.probabilities(batch.dense, ids)
        return scores

    return score


def champion_scorer(release: Release, features: Features) -> ScoreRaw:
    """Return a function that scores raw rows with the live release's graph.

    The rows have the columns of `features`, and each column of the graph is found by its name.

    Raises:
        ContractError: The graph is absent or corrupt, or is not the released graph.
    """
    path = local_path(release.graph_uri)
    if not path.is_file():
        raise ContractError(f"champion graph {path} of version {release.version} is absent")
    _expect_hash(f"champion graph {path}", release.sha256.get("graph"), graph_sha256(path.parent))
    try:
        session = silent_onnxruntime().InferenceSession(
            str(path), providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # onnxruntime's errors share no base class
        raise ContractError(f"champion graph {path} cannot be loaded: {error}") from error

    own = model_in(local_path(release.model_uri)).recommender.features
    columns = ColumnMap(features.columns, own.columns)

    def score(batch: RawBatch) -> NDArray[np.float32]:
        inputs = named_inputs(*columns.rows(batch.dense, batch.categorical))
        (probability,) = session.run([PROBABILITY_OUTPUT.name], inputs)
        scores: NDArray[np.float32] = probability.reshape(len(batch.labels)).astype(np.float32)
        return scores

    return score


def score_holdout(
    raw_uri: str,
    encoded_uri: str,
    *,
    features: Features,
    named: ColumnNames,
    counts: tuple[int, int],
    score_candidate: ScoreEncoded,
    score_champion: ScoreRaw | None,
    slot_sizes: list[int],
    new_ids: Sequence[NDArray[np.int64]],
) -> ScoredHoldout:
    """Score all rows of one held-out folder, batch by batch.

    Both folders contain the same rows in the same order.

    Args:
        raw_uri: Folder of the raw rows.
        encoded_uri: Folder of the encoded rows.
        counts: Number of held-out rows in each of the two manifests.
        features: The recommender's features.
        named: The columns that name user, item and weight.
        score_candidate: See `candidate_scorer`.
        score_champion: See `champion_scorer`. None if there is no champion.
        slot_sizes: Number of ids per categorical column.
        new_ids: Ids that were assigned in this run, per column.
    """
    raw, encoded = local_path(raw_uri), local_path(encoded_uri)
    logger.info("scoring %d held-out rows", _check_counts(raw, encoded, counts))
    of_raw = _raw_parts(raw, features, named=named, score_champion=score_champion)
    of_slots = [np.isin(np.arange(size), ids) for size, ids in zip(slot_sizes, new_ids)]
    is_new = [of_slots[slot] for slot in features.id_positions.slots]
    item = None if named.item is None else features.id_names.index(named.item)
    rows = (
        (batch.labels, score_candidate(batch), *_newness(batch.ids, is_new, item))
        for batch in encoded_batches(encoded, features)
    )
    encoded_labels, candidate, new, unknown, items = _columns(
        rows, (np.int8, np.float32, np.bool_, np.bool_, np.int8)
    )
    _expect_same_labels(of_raw["labels"], encoded_labels)
    return ScoredHoldout(
        **of_raw,
        candidate=candidate,
        has_new_category=new,
        has_unknown_category=unknown,
        item_newness=None if item is None else items,
    )


def score_with_both(
    raw_uri: str, features: Features, named: ColumnNames, *, candidate: Model, champion: Model
) -> ScoredHoldout:
    """Score raw rows with the weights of two models, as in production.

    The result does not say which categories are new.

    Raises:
        ContractError: The rows, or a model's files, are absent or corrupt.
    """
    folder = local_path(raw_uri)
    scorers = [_raw_scorer(model, features) for model in (champion, candidate)]
    of_raw = _raw_parts(
        folder,
        features,
        named=named,
        score_champion=lambda batch: np.column_stack([score(batch) for score in scorers]),
    )
    of_champion, of_candidate = of_raw.pop("champion").reshape(-1, 2).T  # works for 0 batches too
    nothing = np.zeros(len(of_raw["labels"]), np.bool_)
    return ScoredHoldout(
        **of_raw,
        champion=of_champion,
        candidate=of_candidate,
        has_new_category=nothing,
        has_unknown_category=nothing,
        item_newness=None,
    )


def _raw_scorer(model: Model, features: Features) -> ScoreRaw:
    score = candidate_scorer(model)
    workflow = FeatureWorkflow.load(verified_part(model, Model.WORKFLOW))
    columns = ColumnMap(features.columns, model.recommender.features.columns)

    def score_raw(batch: RawBatch) -> NDArray[np.float32]:
        dense, categorical = columns.rows(batch.dense, batch.categorical)
        ids = workflow.encode_categorical(workflow.with_buckets(dense, categorical))
        return score(EncodedBatch(batch.labels, workflow.encode_dense(dense), ids))

    return score_raw


def _raw_parts(
    folder: Path, features: Features, *, named: ColumnNames, score_champion: ScoreRaw | None
) -> dict[str, Any]:
    """Return the fields of `ScoredHoldout` that come from the raw rows."""
    types: dict[str, type[Any]] = {
        **{
            "labels": np.int8,
            "event_seconds": np.float64,
            "requests": np.int64,
            "positions": np.int32,
        },
        **{"categories": np.int64, "weights": np.float32, "champion": np.float32},
    }
    rows = (
        (
            *(
                batch.labels,
                batch.event_seconds,
                batch.requests,
                batch.positions,
                batch.categorical,
                batch.weights,
            ),
            score_champion(batch) if score_champion else np.zeros(0, np.float32),
        )
        for batch in raw_batches(folder, features, weighted=named.has_weights)
    )
    parts: dict[str, Any] = dict(zip(types, _columns(rows, tuple(types.values()))))
    # If there are no batches, `categories` has no columns yet.
    parts["categories"] = parts["categories"].reshape(
        len(parts["labels"]), len(features.position_names)
    )
    if not score_champion:
        parts["champion"] = None
    if not named.has_weights:
        parts["weights"] = None
    users = (
        None
        if named.user is None
        else parts["categories"][:, features.categorical.index(named.user)]
    )
    return {**parts, "users": users, "columns": features.position_features}


def _newness(
    ids: NDArray[np.int64], is_new: Sequence[NDArray[np.bool_]], item: int | None
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.int8]]:
    """Return for each row whether a category is new or unknown, and how new the item is."""
    found, of_item = np.zeros(len(ids), np.bool_), np.zeros(len(ids), np.int8)
    for known, column in zip(is_new, ids.T):
        found |= known[column]
    if item is not None:
        of_item[is_new[item][ids[:, item]]] = NEW_ITEM
        of_item[ids[:, item] == OOV_ID] = UNKNOWN_ITEM
    return found, (ids == OOV_ID).any(axis=1), of_item


def _columns(
    batches: Iterable[tuple[NDArray[Any], ...]], dtypes: tuple[type[Any], ...]
) -> list[NDArray[Any]]:
    """Concatenate each column of the batches.

    The batches of the raw folder and of the encoded folder may end at different rows.
    """
    columns = list(zip(*batches)) or [() for _ in dtypes]
    return [
        np.concatenate(column) if column else np.zeros(0, dtype)
        for column, dtype in zip(columns, dtypes)
    ]


def _numbered(requests: pa.Array, numbers: dict[str, int]) -> NDArray[np.int64]:
    """Return the number of each request, and add new requests to `numbers`."""
    encoded = requests.dictionary_encode(null_encoding="encode")
    known = [
        numbers.setdefault(request, len(numbers)) for request in encoded.dictionary.to_pylist()
    ]
    of_rows: NDArray[np.int64] = np.array(known, np.int64)[encoded.indices.to_numpy()]
    return of_rows


def _expect_same_labels(raw: NDArray[np.int8], encoded: NDArray[np.int8]) -> None:
    if len(differing := np.flatnonzero(raw != encoded)):
        raise ContractError(
            f"labels of raw and encoded holdout differ in {len(differing)} rows, first in row "
            f"{differing[0]}; "
            "expected the same rows in the same order"
        )


def _expect_hash(name: str, stated: str | None, found: str) -> None:
    if stated is not None and stated != found:
        raise ContractError(f"{name} has SHA-256 {found}, expected the recorded {stated}")


# -- the rows


def parquet_files(folder: Path) -> list[Path]:
    """Return the Parquet files of `folder` in row order.

    If HugeCTR's file list exists, the list defines the order. Without a file list, files are
    ordered by name.

    Raises:
        ContractError: There are no files, or the list is wrong.
    """
    files = (
        listed_files(folder) if (folder / FILE_LIST).exists() else sorted(folder.glob("*.parquet"))
    )
    if not files:
        raise ContractError(f"{folder} holds no Parquet files")
    return files


def _check_counts(raw: Path, encoded: Path, stated: tuple[int, int]) -> int:
    """Return the number of held-out rows, if both folders and both manifests agree.

    Raises:
        ContractError: The numbers of rows differ. The message contains both numbers.
    """
    num_raw, num_encoded = _num_rows(raw), _num_rows(encoded)
    if num_raw != num_encoded:
        raise ContractError(
            f"raw holdout has {num_raw} rows and encoded holdout {num_encoded}, expected the same "
            "rows"
        )
    for name, number in zip(("raw", "encoded"), stated):
        if number != num_raw:
            raise ContractError(
                f"{name} holdout has {num_raw} rows, expected the {number} of its manifest"
            )
    return num_raw


def raw_batches(
    folder: Path, features: Features, batch_rows: int = _BATCH_ROWS, *, weighted: bool = False
) -> Iterator[RawBatch]:
    """Yield the raw rows of `folder` in order."""
    numbers: dict[str, int] = {}
    columns = [
        LABEL,
        EVENT_TIME,
        REQUEST_ID,
        POSITION,
        *features.names,
        *([WEIGHT] if weighted else []),
    ]
    for batch in column_batches(folder, columns, batch_rows):
        time = batch.column(EVENT_TIME).cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
        yield RawBatch(
            labels=_labels(batch),
            event_seconds=time.to_numpy(zero_copy_only=False) / 1e6,
            requests=_numbered(batch.column(REQUEST_ID), numbers),
            positions=feature_matrix(batch, [POSITION], "int32", missing=0)[:, 0],
            dense=feature_matrix(batch, features.numeric, "float32", missing=np.nan),
            categorical=category_matrix(batch, features),
            weights=batch.column(WEIGHT).to_numpy()
            if weighted
            else np.ones(batch.num_rows, np.float32),
        )


def encoded_batches(
    folder: Path, features: Features, batch_rows: int = _BATCH_ROWS
) -> Iterator[EncodedBatch]:
    """Yield the encoded rows of `folder` in order."""
    for batch in column_batches(
        folder, [LABEL, *features.dense_inputs, *features.id_names], batch_rows
    ):
        yield EncodedBatch(
            labels=_labels(batch),
            dense=feature_matrix(batch, features.dense_inputs, "float32", missing=np.nan),
            ids=feature_matrix(batch, features.id_names, "int64", missing=MISSING_CATEGORY),
        )


def _num_rows(folder: Path) -> int:
    num_rows = 0
    for path in parquet_files(folder):
        with reading_parquet(path):
            num_rows += pq.read_metadata(path).num_rows
    return num_rows


def column_batches(
    folder: Path, columns: list[str], batch_rows: int = _BATCH_ROWS
) -> Iterator[Any]:
    """Yield Arrow record batches of these columns, in the order of the rows in `folder`.

    Raises:
        ContractError: A file is unreadable or lacks a column.
    """
    for path in parquet_files(folder):
        with reading_parquet(path), parquet_file(path) as file:
            if absent := set(columns) - set(file.schema_arrow.names):
                raise ContractError(f"{path} lacks the columns {sorted(absent)}")
            yield from file.iter_batches(batch_rows, columns=columns)


def _labels(batch: Any) -> NDArray[np.int8]:
    labels = batch.column(LABEL).to_numpy(zero_copy_only=False)
    if not np.isin(labels, (0, 1)).all():
        raise ContractError(
            f"labels hold {sorted(set(labels.tolist()) - {0, 1}, key=str)[:5]}, expected 0 and 1"
        )
    whole: NDArray[np.int8] = labels.astype(np.int8)
    return whole
