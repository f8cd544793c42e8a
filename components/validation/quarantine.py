"""Screen the training rows, and quarantine the rows with a value outside the schema's domain.

Rows are screened only if the rule `domain` is on. Screening reads the files once, and keeps one
batch in memory. Held-out rows are not screened, because the gate evaluates real traffic. Missing
values are always allowed.

Quarantined rows are stored in the model registry, because the step's folder is removed with the
work folder. Each run that quarantined rows has a folder `<store>/quarantine/runs/<run>` with
`quarantine.json` and `rows/*.parquet` (raw columns and `quarantine_reason`). Only `cli.forget`
removes quarantined rows: the rows of a forgotten user. The number of rows in `quarantine.json`
still includes the removed rows. The lake does not change, so it still contains the quarantined
rows.
"""

import hashlib
import json
import logging
import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from evergreen.config.features import Features
from evergreen.config.validation import OFF, QUARANTINE
from evergreen.contracts import raw_rows
from evergreen.contracts.manifests import RawDataset
from evergreen.registry.runs import run_folder
from evergreen.rows.archived_rows import parquet_file, parquet_writer, reading_parquet
from evergreen.rows.raw_schema import BATCH_ROWS
from evergreen.runtime.durable import sha256_tree, whole_directory
from evergreen.runtime.errors import ContractError
from evergreen.storage.uris import local_path

logger = logging.getLogger(__name__)

_TRAIN, _QUARANTINED = "train", "quarantine"
_REASON_COLUMN = "quarantine_reason"
_NUM_EXAMPLES = 3
_MANIFEST = "quarantine.json"

Reasons = dict[int, str]
"""Reasons why rows of a batch were rejected. The keys are the positions of the rows, ascending."""


@dataclass(frozen=True, kw_only=True)
class ScreenedRows:
    """Rows for the check and for training."""

    dataset: RawDataset
    """Manifest of the rows. If no row was quarantined, this is the manifest of the run's own
    dataset."""
    files: list[Path]
    """Files of the rows. The paths of the files are valid until the step's folder is complete."""
    num_outside: int | None = None
    """Number of rows outside the schema's domain. None if the rows were not screened against the
    domain."""
    examples: list[str] = field(default_factory=list)
    """Reason for each of the first rows outside the domain."""
    quarantined: Path | None = None
    """Temporary folder of the quarantined rows, which are moved when the step's folder is complete.
    None if no row was quarantined."""


def screen_rows(
    raw: RawDataset,
    schema: Any | None,
    *,
    action: str,
    folder: Path,
    final: Path,
    quarantine: Path,
) -> ScreenedRows:
    """Return the rows to train on, after screening the training rows by the rule `domain`.

    Rows are not screened if the rule is off. A first run does not screen either, because it infers
    its schema later. Rows that an earlier attempt of the run quarantined are removed.

    Args:
        raw: Manifest of the rows.
        schema: The schema in force. None means that there is no schema yet.
        action: Action of the rule. The action `quarantine` separates the rows outside the domain.
            Any other action only counts these rows.
        folder: The step's folder, which is not complete yet. Rows are written to the subfolders
            `train` and `quarantine`.
        final: Path of the step's folder when it is complete.
        quarantine: Folder of the registry for the quarantined rows (`rows_folder`).

    Raises:
        ContractError: The rows are not in a folder, or a file is corrupt.
    """
    shutil.rmtree(quarantine.parent, ignore_errors=True)
    files = _parquet_files(local_path(raw.train_uri))
    if action == OFF or schema is None:
        return ScreenedRows(dataset=raw, files=files)
    find_outside = make_domain(schema, raw.recommender.features, raw.excluded_columns)
    num_outside, examples = 0, list[str]()
    for path in files:
        batches = (
            _split_file(path, folder, find_outside)
            if action == QUARANTINE
            else map(find_outside, _read_batches(path))
        )
        for reasons in batches:
            num_outside += len(reasons)
            examples += list(reasons.values())[: _NUM_EXAMPLES - len(examples)]
    screened = ScreenedRows(dataset=raw, files=files, num_outside=num_outside, examples=examples)
    if not num_outside or action != QUARANTINE:
        for name in (_TRAIN, _QUARANTINED):
            shutil.rmtree(folder / name, ignore_errors=True)
        return screened
    logger.info("%d rows are quarantined", num_outside)
    digest = hashlib.sha256(f"{raw.digest}\n{sha256_tree(folder / _TRAIN)}\n".encode()).hexdigest()
    dataset = replace(
        raw,
        train_uri=(final / _TRAIN).as_uri(),
        num_train_rows=raw.num_train_rows - num_outside,
        digest=digest,
        num_quarantined=num_outside,
        quarantine_uri=quarantine.as_uri(),
    )
    return replace(
        screened,
        dataset=dataset,
        files=sorted((folder / _TRAIN).iterdir()),
        quarantined=folder / _QUARANTINED,
    )


def _parquet_files(folder: Path) -> list[Path]:
    """Return the Parquet files of `folder`, sorted by name.

    Raises:
        ContractError: `folder` is not a folder.
    """
    if not folder.is_dir():
        raise ContractError(f"training rows {folder} is not a folder")
    return sorted(folder.glob("*.parquet"))


def _read_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield all columns of a Parquet file in batches of rows.

    Raises:
        ContractError: The file is corrupt.
    """
    with reading_parquet(path):
        yield from parquet_file(path).iter_batches(batch_size=BATCH_ROWS)


def _split_file(
    path: Path, folder: Path, find: Callable[[pa.RecordBatch], Reasons]
) -> Iterator[Reasons]:
    """Write valid rows below `train`, and rejected rows with their reasons below `quarantine`."""
    schema = pq.read_schema(path)
    with_reason = schema.append(pa.field(_REASON_COLUMN, pa.string()))
    for name in (_TRAIN, _QUARANTINED):
        (folder / name).mkdir(exist_ok=True)
    with (
        parquet_writer(folder / _TRAIN / path.name, schema) as to_rest,
        parquet_writer(folder / _QUARANTINED / path.name, with_reason) as to_gone,
    ):
        for batch in _read_batches(path):
            gone = find(batch)
            stays = np.ones(batch.num_rows, dtype=bool)
            stays[list(gone)] = False
            to_rest.write_batch(batch.filter(pa.array(stays)))
            texts, left = pa.array(list(gone.values()), pa.string()), batch.filter(pa.array(~stays))
            to_gone.write_batch(
                pa.RecordBatch.from_arrays([*left.columns, texts], schema=with_reason)
            )
            yield gone


def make_domain(
    schema: Any, features: Features, excluded: Collection[str] = ()
) -> Callable[[pa.RecordBatch], Reasons]:
    """Return a function that finds rows with a value outside the domain in `schema`."""
    lists = {domain.name: domain.value for domain in schema.string_domain}
    bounds: dict[str, tuple[float, float]] = {}
    allowed: dict[str, pa.Array] = {}
    for feature in schema.feature:
        kind = feature.WhichOneof("domain_info")
        if feature.name in excluded:
            continue
        if (
            kind in ("float_domain", "int_domain")
            and feature.name not in features.categorical + features.lists
        ):
            domain = getattr(feature, kind)
            low = float(domain.min) if domain.HasField("min") else -math.inf
            bounds[feature.name] = (low, float(domain.max) if domain.HasField("max") else math.inf)
        elif kind in ("string_domain", "domain"):
            values = (
                feature.string_domain.value
                if kind == "string_domain"
                else lists.get(feature.domain, [])
            )
            allowed[feature.name] = pa.array(values, pa.string())

    def find(batch: pa.RecordBatch) -> Reasons:
        names, found = batch.schema.names, defaultdict[int, list[str]](list)
        for name, (low, high) in bounds.items():
            if name in names:
                values = batch.column(name)
                for at in _positions(pc.or_(pc.less(values, low), pc.greater(values, high))):
                    found[at].append(
                        f"{name} is {values[at].as_py():g}, expected {low:g} to {high:g}"
                    )
        for name, values in allowed.items():
            if name in names:
                column, rows = batch.column(name), np.arange(batch.num_rows)
                if name in features.lists:
                    column, rows = column.flatten(), np.repeat(rows, raw_rows.list_lengths(column))
                texts = column.cast(pa.string())
                for at in _positions(
                    pc.and_(pc.invert(pc.is_in(texts, value_set=values)), pc.is_valid(texts))
                ):
                    reason = (
                        f"{name} is {texts[at].as_py()}, expected one of the schema's "
                        f"{len(values)} values"
                    )
                    found[int(rows[at])].append(reason)
        return {at: "; ".join(found[at]) for at in sorted(found)}

    return find


def _positions(mask: Any) -> list[int]:
    return [int(at) for at in np.flatnonzero(mask.fill_null(False).to_numpy(zero_copy_only=False))]


# -- quarantined rows in the registry


@dataclass(frozen=True, kw_only=True)
class QuarantinedRun:
    """The rows that one run quarantined."""

    run: str
    time: str
    num_rows: int


def quarantine_folder(store: Path) -> Path:
    """Return the folder of all quarantined rows."""
    return store / "quarantine"


def rows_folder(store: Path, run: str) -> Path:
    """Return the folder of the rows that `run` quarantined."""
    return quarantine_folder(store) / "runs" / run_folder(store, run).name / "rows"


def store_quarantined(run: str, rows: Path, final: Path, *, num_rows: int) -> None:
    """Copy the Parquet files in `rows` into the registry.

    Args:
        run: Name of the run.
        rows: Folder of the files.
        final: Folder of the registry (`rows_folder`). Files of an earlier attempt are replaced.
        num_rows: Number of rows in the files.
    """
    record = QuarantinedRun(run=run, time=datetime.now(timezone.utc).isoformat(), num_rows=num_rows)
    with whole_directory(final.parent, replace=True) as folder:
        shutil.copytree(rows, folder / final.name)
        (folder / _MANIFEST).write_text(
            json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8"
        )


def read_quarantined_runs(store: Path) -> list[QuarantinedRun]:
    """Return the quarantined rows of every run, oldest first.

    Raises:
        ContractError: A manifest cannot be read.
    """
    found = []
    for path in (quarantine_folder(store) / "runs").glob(f"[!.]*/{_MANIFEST}"):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            found.append(
                QuarantinedRun(
                    **{each.name: document[each.name] for each in fields(QuarantinedRun)}
                )
            )
        except (ValueError, TypeError, KeyError) as error:
            raise ContractError(f"{path} cannot be read: {error!r}") from error
    return sorted(found, key=lambda record: (record.time, record.run))
