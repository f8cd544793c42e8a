"""Separate the training rows that have a value outside the schema's domain.

The pass over the files happens only if the rule `domain` is on, and keeps one batch in memory.
Held-out rows are not screened, because the gate evaluates real traffic. Missing values are always
allowed.
"""

import hashlib
import logging
import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from components.validation.round import Round
from components.validation.rows import read_all_columns
from evergreen.config.features import Features
from evergreen.config.validation import DOMAIN, OFF, QUARANTINE
from evergreen.contracts import raw_rows
from evergreen.contracts.manifests import RawDataset
from evergreen.rows.archived_rows import parquet_writer
from evergreen.runtime.durable import sha256_tree

logger = logging.getLogger(__name__)

_TRAIN, _QUARANTINED = "train", "quarantine"
_REASON_COLUMN = "quarantine_reason"
_NUM_EXAMPLES = 3

Reasons = dict[int, str]
"""Reasons why rows of a batch were rejected. The keys are the positions of the rows, ascending."""


@dataclass(frozen=True, kw_only=True)
class ScreenedRows:
    """Rows to check and to train on."""

    dataset: RawDataset
    """Manifest of the rows. If no row was quarantined, this is the manifest of the run's own
    dataset."""
    files: list[Path]
    """Files of the rows. Their paths are valid until the step's folder is complete."""
    num_outside: int | None = None
    """Number of rows outside the schema's domain. None if the rows were not screened against the
    domain."""
    examples: list[str] = field(default_factory=list)
    """Reasons of the first rows outside the domain."""
    quarantined: Path | None = None
    """Temporary folder of the quarantined rows, which are moved when the step's folder is complete.
    None if no row was quarantined."""


def screen_rows(round_: Round, folder: Path) -> ScreenedRows:
    """Return the training rows that pass the rule about single rows.

    Rows are not screened if the rule is off. A first run does not screen either, because it infers
    its schema later.

    Args:
        round_: The run's inputs.
        folder: The step's folder, which is not complete yet. Rows are written to the subfolders
            `train` and `quarantine`.
    """
    raw, files, schema = round_.raw, round_.files, round_.schema
    action = round_.rules.action_of(DOMAIN)
    if action == OFF or schema is None:
        return ScreenedRows(dataset=raw, files=files)
    find_outside = make_domain(schema, raw.recommender.features, raw.excluded_columns)
    num_outside, examples = 0, list[str]()
    for path in files:
        batches = (
            _split_file(path, folder, find_outside)
            if action == QUARANTINE
            else map(find_outside, read_all_columns(path))
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
        train_uri=(round_.folder / _TRAIN).as_uri(),
        num_train_rows=raw.num_train_rows - num_outside,
        digest=digest,
        num_quarantined=num_outside,
        quarantine_uri=round_.quarantine.as_uri(),
    )
    return replace(
        screened,
        dataset=dataset,
        files=sorted((folder / _TRAIN).iterdir()),
        quarantined=folder / _QUARANTINED,
    )


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
        for batch in read_all_columns(path):
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
