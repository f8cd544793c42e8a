"""The training rows without those that a rule quarantines and with those that people took back, as a dataset.

A pass over the files that only happens if a rule about rows is on, or rows of an earlier quarantine come back. It holds
one batch of rows. Held-out rows are not screened: the gate judges by what happened. A missing value offends no rule.
"""

import hashlib
import logging
import math
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from components.contracts import raw_rows
from components.contracts.features import Features
from components.contracts.manifests import Model, RawDataset
from components.runtime.durable import sha256_tree
from components.storage.uris import local_path
from components.store import models as model_store
from components.store.promotion_journal import moment_of
from components.validation import quarantine_store
from components.validation.quarantine_store import QuarantinedBatch, QuarantinedRun
from components.validation.round import Round
from components.validation.rows import parquet_files, read_all_columns
from components.validation.rules import DATASET, INFO, QUARANTINE, Finding, RuleSet

logger = logging.getLogger(__name__)

TRAIN, QUARANTINED = "train", "quarantine"
RULE_COLUMN, REASON_COLUMN = "quarantine_rule", "quarantine_reason"
NUM_EXAMPLES = 3

RowKey = tuple[str, int]
"""Request id and row."""


@dataclass(frozen=True, kw_only=True)
class ScreenedRows:
    """The rows to judge and to learn from."""

    dataset: RawDataset
    """The round's own if no row went or came."""
    files: list[Path]
    """Where the rows are until the step's folder is complete."""
    findings: list[Finding] = field(default_factory=list)
    """Of the rules about single rows."""
    num_by_rule: dict[str, int] = field(default_factory=dict)
    """Quarantined rows, by the rule that stands beside them."""


def screen_rows(round_: Round, schema: Any | None, folder: Path) -> ScreenedRows:
    """The training rows that pass the rules about rows, with those that people took back.

    `schema` is that in force, None in a first run, which is yet to infer it; rows go into `train` and `quarantine`
    below `folder`, the step's while it is made.
    """
    store, run, raw, rules = round_.store, round_.run, round_.raw, round_.rules
    files = parquet_files(local_path(raw.train_uri))
    row_rules = make_row_rules(rules, schema, raw.recommender.features, excluded=raw.excluded_columns)
    returning = ReturningRows(store, round_.parent, raw)
    tally, num_back, dataset = _RowTally(), 0, raw
    if row_rules or returning.taken:
        for name in (TRAIN, QUARANTINED):
            (folder / name).mkdir()
        for path in files:
            _split_file(path, folder, row_rules, rules=rules, returning=returning, tally=tally)
        # Older than all others, and so is its name in the order of names.
        num_back = returning.write(folder / TRAIN / "00000-replayed.parquet")
    num_gone = tally.quarantined.total()
    if num_gone or num_back:
        logger.info("%d rows are quarantined, %d come back", num_gone, num_back)
        files = sorted((folder / TRAIN).iterdir())
        dataset = _make_dataset(round_, folder / TRAIN, num_gone=num_gone, num_back=num_back)
    else:
        shutil.rmtree(folder / TRAIN, ignore_errors=True)
    if num_gone:
        kept = quarantine_store.keep_quarantined(
            store,
            run,
            folder / QUARANTINED,
            num_by_rule=dict(tally.quarantined),
            dataset=dataset,
        )
        dataset = replace(dataset, quarantine_uri=kept.as_uri())
    else:
        shutil.rmtree(folder / QUARANTINED, ignore_errors=True)
        quarantine_store.forget_quarantined(store, run)
    if returning.taken:
        quarantine_store.write_taken(store, run, digest=dataset.digest, batches=returning.taken)
    findings = _judge_tally(tally, rules, num_back=num_back, num_rows=raw.num_train_rows)
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
    returning: "ReturningRows",
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
            gone = _find_quarantined(batch, row_rules, rules=rules, exempt=returning.find_exempt(batch), tally=tally)
            stays = np.ones(batch.num_rows, dtype=bool)
            stays[list(gone)] = False
            to_rest.write_batch(batch.filter(pa.array(stays)))
            texts = [pa.array([both[i] for _, both in sorted(gone.items())], text) for i in (0, 1)]
            left = batch.filter(pa.array(~stays))
            to_gone.write_batch(pa.RecordBatch.from_arrays([*left.columns, *texts], schema=with_reason))


def _find_quarantined(
    batch: pa.RecordBatch, row_rules: "Sequence[RowRule]", *, rules: RuleSet, exempt: Collection[int], tally: _RowTally
) -> dict[int, tuple[str, str]]:
    """Rule and reason of the batch's rows to quarantine, by position; every offence is counted in `tally`.

    Those that are `exempt` offend no rule.
    """
    hits: dict[int, dict[str, list[str]]] = {}
    for rule in row_rules:
        for at, reason in rule.find(batch):
            if at not in exempt:
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


def _make_dataset(round_: Round, train: Path, *, num_gone: int, num_back: int) -> RawDataset:
    """The manifest of the rows in `train`, which is to lie in the step's folder."""
    raw = round_.raw
    return replace(
        raw,
        train_uri=(round_.folder / TRAIN).as_uri(),
        num_train_rows=raw.num_train_rows - num_gone + num_back,
        digest=hashlib.sha256(f"{raw.digest}\n{sha256_tree(train)}\n".encode()).hexdigest(),
        num_quarantined=num_gone,
    )


def _judge_tally(tally: _RowTally, rules: RuleSet, *, num_back: int, num_rows: int) -> list[Finding]:
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
    if num_back:
        text = f"{num_back} rows of earlier quarantines, which people took back, are learned with these"
        found += rules.find("quarantine_replayed", DATASET, text, at_most=INFO)
    return found


class ReturningRows:
    """The rows that people took out of quarantine, as one round meets them.

    A row in the round's window, or late beside it, comes from the lake: no rule touches it any more. An earlier one is
    read from the store and learned beside the window, as long as no model of the parent's line has learned it: a
    round that took it and was refused has lost nothing. A model's line is known by its parents, what it learned from
    the store by its dataset's digest. From the lake it learned every row of its window that its own run did not
    quarantine, whatever another run of the same window did. That is not known of late rows, which lie before it.
    """

    def __init__(self, store: Path, parent: Path | None, raw: RawDataset) -> None:
        """Reads what is stored.

        `parent` is the folder of the model whose line the round continues.

        Raises:
            ContractError: what is stored cannot be read.
        """
        self._store, self._raw = store, raw
        replayed = quarantine_store.read_replayed(store)
        line = list(_line(store, parent)) if replayed else []
        learned = _learned_batches(store, line)
        runs = {kept.run: kept for kept in quarantine_store.read_quarantined_runs(store)} if replayed else {}
        end = moment_of(raw.last_learned_time)
        # Rows newer than those that this round learns wait for a round that reaches them.
        self.taken = sorted(each for each in replayed - learned if moment_of(runs[each.run].last_learned_time) <= end)
        """What is all in this round's dataset, from the store or from the lake."""
        self._seen = self._read_keys(learned) | self._read_from_lake(line, runs.values())
        self._replayed = self._read_keys(self.taken) | self._seen

    def _read_keys(self, batches: Iterable[QuarantinedBatch]) -> set[RowKey]:
        return {key for rows in self._read_rows(batches) for key in _row_keys(rows)}

    def _read_from_lake(self, line: Sequence[Model], runs: Iterable[QuarantinedRun]) -> set[RowKey]:
        """Those of the rows taken back that a model of the line met in its window and did not quarantine."""
        digests, windows = {model.raw_digest for model in line}, [_window(model) for model in line]
        own = {QuarantinedBatch(kept.run, rule) for kept in runs if kept.digest in digests for rule in kept.num_by_rule}
        found = {
            key
            for rows in self._read_rows(each for each in self.taken if each not in own)
            for key, time in zip(_row_keys(rows), rows.column(raw_rows.EVENT_TIME).to_pylist())
            if any(start <= time <= end for start, end in windows)
        }
        return found - self._read_keys(own) if found else found

    def _read_rows(self, batches: Iterable[QuarantinedBatch]) -> Iterator[pa.RecordBatch]:
        for run, rule in batches:
            for path in sorted(quarantine_store.rows_folder(self._store, run).glob("*.parquet")):
                for rows in read_all_columns(path):
                    yield rows.filter(pc.equal(rows.column(RULE_COLUMN), rule))

    def find_exempt(self, batch: pa.RecordBatch) -> set[int]:
        """Positions of the rows of the round that no rule touches; they are not read from the store as well."""
        if not self._replayed:
            return set()
        exempt = {at: key for at, key in enumerate(_row_keys(batch)) if key in self._replayed}
        self._seen.update(exempt.values())
        return set(exempt)

    def write(self, path: Path) -> int:
        """Writes the rows that lie before the window, each once and ordered by time; 0 = none, and no file."""
        begin, found = moment_of(self._raw.first_event_time), []
        for batch in self._read_rows(self.taken):
            times, fresh = batch.column(raw_rows.EVENT_TIME).to_pylist(), []
            for at, key in enumerate(_row_keys(batch)):
                if key not in self._seen and times[at] < begin:
                    self._seen.add(key)
                    fresh.append(at)
            found.append(pa.Table.from_batches([batch]).take(pa.array(fresh, pa.int64())))
        rows = pa.concat_tables(found).drop([RULE_COLUMN, REASON_COLUMN]) if found else None
        if rows is None or not rows.num_rows:
            return 0
        pq.write_table(rows.take(pc.sort_indices(rows, [(raw_rows.EVENT_TIME, "ascending")])), path)
        return int(rows.num_rows)


def _row_keys(batch: pa.RecordBatch) -> list[RowKey]:
    return list(zip(batch.column(raw_rows.REQUEST_ID).to_pylist(), batch.column(raw_rows.ROW).to_pylist()))


def _line(store: Path, parent: Path | None) -> Iterator[Model]:
    """The parent and the models before it in its line."""
    folder = parent
    while folder is not None and (folder / Model.MANIFEST).exists():
        model = Model.read(folder / Model.MANIFEST)
        yield model
        folder = model_store.model_folder(store, model.parent_model_id) if model.parent_model_id else None


def _window(model: Model) -> tuple[datetime, datetime]:
    """The times of the first and the last row that the model's own round may have learned."""
    start = moment_of(model.window_start) if model.window_start else datetime.min.replace(tzinfo=timezone.utc)
    return start, moment_of(model.last_learned_time)


def _learned_batches(store: Path, line: Sequence[Model]) -> set[QuarantinedBatch]:
    """What a model of the line has learned from the store."""
    digests = {model.raw_digest for model in line}
    return {batch for digest, taken in quarantine_store.read_taken(store) if digest in digests for batch in taken}


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
