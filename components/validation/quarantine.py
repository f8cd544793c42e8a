"""The training rows without those that a rule quarantines, as a dataset.

A pass over the files that only happens if a rule about rows is on. It holds one batch of rows. Held-out rows are not
screened: the gate judges by what happened. A missing value offends no rule.
"""

import hashlib
import logging
import math
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from components.contracts import raw_rows
from components.contracts.features import Features
from components.contracts.manifests import RawDataset
from components.runtime.durable import sha256_tree
from components.storage.uris import local_path
from components.validation import quarantine_store
from components.validation.round import Round
from components.validation.rows import parquet_files, read_all_columns
from components.validation.rules import DATASET, INFO, QUARANTINE, Finding, RuleSet

logger = logging.getLogger(__name__)

TRAIN, QUARANTINED = "train", "quarantine"
RULE_COLUMN, REASON_COLUMN = "quarantine_rule", "quarantine_reason"
NUM_EXAMPLES = 3


@dataclass(frozen=True, kw_only=True)
class ScreenedRows:
    """The rows to judge and to learn from."""

    dataset: RawDataset
    """The round's own if no row went."""
    files: list[Path]
    """Where the rows are until the step's folder is complete."""
    findings: list[Finding] = field(default_factory=list)
    """Of the rules about single rows."""
    num_by_rule: dict[str, int] = field(default_factory=dict)
    """Quarantined rows, by the rule that stands beside them."""


def screen_rows(round_: Round, schema: Any | None, folder: Path) -> ScreenedRows:
    """The training rows that pass the rules about rows.

    `schema` is that in force, None in a first run, which is yet to infer it; rows go into `train` and `quarantine`
    below `folder`, the step's while it is made.
    """
    store, run, raw, rules = round_.store, round_.run, round_.raw, round_.rules
    files = parquet_files(local_path(raw.train_uri))
    row_rules = make_row_rules(rules, schema, raw.recommender.features, excluded=raw.excluded_columns)
    tally, dataset = _RowTally(), raw
    if row_rules:
        for name in (TRAIN, QUARANTINED):
            (folder / name).mkdir()
        for path in files:
            _split_file(path, folder, row_rules, rules=rules, tally=tally)
    if num_gone := tally.quarantined.total():
        logger.info("%d rows are quarantined", num_gone)
        files = sorted((folder / TRAIN).iterdir())
        kept = quarantine_store.keep_quarantined(store, run, folder / QUARANTINED, num_by_rule=dict(tally.quarantined))
        dataset = replace(
            raw,
            train_uri=(round_.folder / TRAIN).as_uri(),
            num_train_rows=raw.num_train_rows - num_gone,
            digest=hashlib.sha256(f"{raw.digest}\n{sha256_tree(folder / TRAIN)}\n".encode()).hexdigest(),
            num_quarantined=num_gone,
            quarantine_uri=kept.as_uri(),
        )
    else:
        for name in (TRAIN, QUARANTINED):
            shutil.rmtree(folder / name, ignore_errors=True)
        quarantine_store.forget_quarantined(store, run)
    findings = _judge_tally(tally, rules, num_rows=raw.num_train_rows)
    if schema is None and "domain" in rules.row_rules():
        text = "rule domain found nothing to compare with: there is no schema yet"
        findings += rules.find("domain", DATASET, text, at_most=INFO)
    return ScreenedRows(dataset=dataset, files=files, findings=findings, num_by_rule=dict(tally.quarantined))


@dataclass
class _RowTally:
    """What the rules found, over all files."""

    hits: Counter[str] = field(default_factory=Counter)
    quarantined: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)


def _split_file(
    path: Path,
    folder: Path,
    row_rules: "Sequence[RowRule]",
    *,
    rules: RuleSet,
    tally: _RowTally,
) -> None:
    """Writes the rows that stay below `train`, the others with rule and reason below `quarantine`."""
    schema, text = pq.read_schema(path), pa.string()
    with_reason = schema.append(pa.field(RULE_COLUMN, text)).append(pa.field(REASON_COLUMN, text))
    with (
        pq.ParquetWriter(folder / TRAIN / path.name, schema) as to_rest,
        pq.ParquetWriter(folder / QUARANTINED / path.name, with_reason) as to_gone,
    ):
        for batch in read_all_columns(path):
            gone = _find_quarantined(batch, row_rules, rules=rules, tally=tally)
            stays = np.ones(batch.num_rows, dtype=bool)
            stays[list(gone)] = False
            to_rest.write_batch(batch.filter(pa.array(stays)))
            texts = [pa.array([both[i] for _, both in sorted(gone.items())], text) for i in (0, 1)]
            left = batch.filter(pa.array(~stays))
            to_gone.write_batch(pa.RecordBatch.from_arrays([*left.columns, *texts], schema=with_reason))


def _find_quarantined(
    batch: pa.RecordBatch, row_rules: "Sequence[RowRule]", *, rules: RuleSet, tally: _RowTally
) -> dict[int, tuple[str, str]]:
    """Rule and reason of the batch's rows to quarantine, by position; every offence is counted in `tally`."""
    hits: dict[int, dict[str, list[str]]] = {}
    for rule in row_rules:
        for at, reason in rule.find(batch):
            hits.setdefault(at, {}).setdefault(rule.name, []).append(reason)
    gone: dict[int, tuple[str, str]] = {}
    for at, by_rule in hits.items():
        tally.hits.update(by_rule.keys())
        reasons = {name: "; ".join(each) for name, each in by_rule.items()}
        for name, reason in reasons.items():
            if len(examples := tally.examples.setdefault(name, [])) < NUM_EXAMPLES:
                examples.append(reason)
        if named := [name for name in reasons if rules.actions[name] == QUARANTINE]:
            gone[at] = (named[0], "; ".join(reasons[name] for name in named))
            tally.quarantined[named[0]] += 1
    return gone


def _judge_tally(tally: _RowTally, rules: RuleSet, *, num_rows: int) -> list[Finding]:
    found: list[Finding] = []
    for name, hits in tally.hits.items():
        num_quarantined = tally.quarantined[name]
        gone = f", {num_quarantined} of them quarantined by it" if rules.actions[name] == QUARANTINE else ""
        text = f"rule {name} is broken by {hits} of {num_rows} rows{gone}; first: {'; '.join(tally.examples[name])}"
        found += [replace(finding, num_quarantined=num_quarantined) for finding in rules.find(name, DATASET, text)]
    limit, num_gone = rules.settings.max_quarantined_fraction, tally.quarantined.total()
    if num_gone > limit * num_rows:
        text = f"{num_gone} of {num_rows} rows are quarantined, expected at most {limit:.2%}"
        found += rules.find("quarantined_share", DATASET, text)
    return found


# -- the rules about single rows


Offences = Iterator[tuple[int, str]]
"""Position of a row in the batch, and why it offends."""


class RowRule(NamedTuple):
    """One rule, ready to look at batches."""

    name: str
    find: Callable[[pa.RecordBatch], Offences]


def make_row_rules(
    rules: RuleSet, schema: Any | None, features: Features, *, excluded: Collection[str] = ()
) -> list[RowRule]:
    """The rules that are on, in the order of `rules.RULES`, without `domain` if there is no schema."""
    ready = []
    for name in rules.row_rules():
        if name == "named_rows":
            ready.append(RowRule(name, _make_named_rows(rules.settings.request_ids, rules.settings.days)))
        elif schema is not None:
            ready.append(RowRule(name, _make_domain(schema, features, excluded)))
    return ready


def _make_named_rows(request_ids: tuple[str, ...], days: tuple[str, ...]) -> Callable[[pa.RecordBatch], Offences]:
    def find(batch: pa.RecordBatch) -> Offences:
        columns = {"request": batch.column(raw_rows.REQUEST_ID)}
        columns["day"] = pc.strftime(batch.column(raw_rows.EVENT_TIME), format="%Y-%m-%d")
        for (kind, column), named in zip(columns.items(), (request_ids, days)):
            for at in _positions(pc.is_in(column, value_set=pa.array(named, pa.string()))):
                yield at, f"{kind} {column[at].as_py()!r} is named by the rule"

    return find


def _make_domain(schema: Any, features: Features, excluded: Collection[str]) -> Callable[[pa.RecordBatch], Offences]:
    lists = {domain.name: domain.value for domain in schema.string_domain}
    bounds: dict[str, tuple[float, float]] = {}
    allowed: dict[str, pa.Array] = {}
    for feature in schema.feature:
        kind = feature.WhichOneof("domain_info")
        if feature.name in excluded:
            continue
        if kind in ("float_domain", "int_domain") and feature.name not in features.categorical + features.lists:
            domain = getattr(feature, kind)
            low = float(domain.min) if domain.HasField("min") else -math.inf
            bounds[feature.name] = (low, float(domain.max) if domain.HasField("max") else math.inf)
        elif kind in ("string_domain", "domain"):
            values = feature.string_domain.value if kind == "string_domain" else lists.get(feature.domain, [])
            allowed[feature.name] = pa.array(values, pa.string())

    def find(batch: pa.RecordBatch) -> Offences:
        names = batch.schema.names
        for name, (low, high) in bounds.items():
            if name in names:
                values = batch.column(name)
                for at in _positions(pc.or_(pc.less(values, low), pc.greater(values, high))):
                    yield at, f"{name} is {values[at].as_py():g}, expected {low:g} to {high:g}"
        for name, values in allowed.items():
            if name in names:
                column, rows = batch.column(name), np.arange(batch.num_rows)
                if name in features.lists:
                    column, rows = column.flatten(), np.repeat(rows, raw_rows.list_lengths(column))
                texts = column.cast(pa.string())
                for at in _positions(pc.and_(pc.invert(pc.is_in(texts, value_set=values)), pc.is_valid(texts))):
                    reason = f"{name} is {texts[at].as_py()}, expected one of the schema's {len(values)} values"
                    yield int(rows[at]), reason

    return find


def _positions(mask: Any) -> list[int]:
    return [int(at) for at in np.flatnonzero(mask.fill_null(False).to_numpy(zero_copy_only=False))]
