"""The training rows without those that a rule quarantines and with those that people took back, as a dataset.

A pass over the files that only happens if a rule about rows is on, or rows of an earlier quarantine come back. It holds
one batch of rows, and the positions of one file's offending rows. A file without such rows is linked, not rewritten.
Held-out rows are not screened: the gate judges by what happened. A missing value offends no rule but `label_kind`.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from components.contracts import criteo
from components.contracts.manifests import Model, RawDataset
from components.runtime.durable import sha256_tree
from components.runtime.errors import ContractError, first_line
from components.store import models as model_store
from components.store.promotion_journal import moment_of
from components.validation import quarantine_store
from components.validation.inputs import ValidationRound
from components.validation.quarantine_store import QuarantinedBatch
from components.validation.rows import read_all_columns
from components.validation.rules import DATASET, INFO, QUARANTINE, Finding, RuleSet

logger = logging.getLogger(__name__)

TRAIN, QUARANTINED = "train", "quarantine"
RULE_COLUMN, REASON_COLUMN = "quarantine_rule", "quarantine_reason"
NUM_EXAMPLES = 3

RowKey = tuple[str, int]
"""Request id and row."""
Marks = dict[int, tuple[str, str]]
"""Row of a file -> rule and reason."""


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


def screen_rows(round_: ValidationRound, files: Sequence[Path], folder: Path) -> ScreenedRows:
    """The rows that pass the rules about rows, with those that people took back.

    Args:
        round_: The run's inputs.
        files: Its training rows, in order; all of them have all columns.
        folder: The step's folder while it is made; rows go into `train` and `quarantine` below it.
    """
    store, run, rules = round_.store, round_.run, round_.rules
    row_rules, idle = make_row_rules(rules, round_.schema, excluded=round_.excluded)
    returning = ReturningRows(store, round_.champion.folder if round_.champion else None, round_.raw)
    screened = ScreenedRows(dataset=round_.raw, files=list(files))
    if row_rules or returning.taken:
        screened = _split_rows(round_, files, folder, row_rules=row_rules, returning=returning)
    if screened.num_by_rule:
        kept = quarantine_store.keep_quarantined(
            store,
            run,
            folder / QUARANTINED,
            num_by_rule=screened.num_by_rule,
            last_event_time=round_.raw.last_event_time,
        )
        screened = replace(screened, dataset=replace(screened.dataset, quarantine_uri=kept.as_uri()))
    else:
        quarantine_store.forget_quarantined(store, run)
    if returning.taken:
        quarantine_store.write_taken(store, run, digest=screened.dataset.digest, batches=returning.taken)
    idle_findings: list[Finding] = []
    for name in idle:
        text = f"rule {name} found nothing to compare with: there is no schema yet"
        idle_findings += rules.find(name, DATASET, text, at_most=INFO)
    return replace(screened, findings=idle_findings + screened.findings)


@dataclass
class _RowTally:
    """What the rules found, over all files."""

    hits: Counter[str] = field(default_factory=Counter)
    quarantined: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)


def _split_rows(
    round_: ValidationRound,
    files: Sequence[Path],
    folder: Path,
    *,
    row_rules: Sequence[RowRule],
    returning: ReturningRows,
) -> ScreenedRows:
    raw, tally = round_.raw, _RowTally()
    (folder / TRAIN).mkdir()
    for path in files:
        marks = _mark_rows(path, row_rules, rules=round_.rules, returning=returning, tally=tally)
        if marks:
            _split_file(path, marks, rest=folder / TRAIN / path.name, gone=folder / QUARANTINED / path.name)
        else:
            _link_file(path, folder / TRAIN / path.name)
    num_gone = sum(tally.quarantined.values())
    # Older than all others, and so is its name in the order of names.
    num_back = returning.write(folder / TRAIN / "00000-replayed.parquet")
    findings = _judge_tally(tally, round_.rules, num_gone=num_gone, num_back=num_back, num_rows=raw.num_train_rows)
    if not num_gone and not num_back:
        shutil.rmtree(folder / TRAIN)
        return ScreenedRows(dataset=raw, files=list(files), findings=findings)
    logger.info("%d rows are quarantined, %d come back", num_gone, num_back)
    trees = f"{raw.digest}\n{sha256_tree(folder / TRAIN)}\n"
    dataset = replace(
        raw,
        train_uri=(round_.folder / TRAIN).as_uri(),
        num_train_rows=raw.num_train_rows - num_gone + num_back,
        digest=hashlib.sha256(trees.encode()).hexdigest(),
        num_quarantined=num_gone,
    )
    rest = sorted((folder / TRAIN).iterdir())
    return ScreenedRows(dataset=dataset, files=rest, findings=findings, num_by_rule=dict(tally.quarantined))


def _mark_rows(
    path: Path, row_rules: Sequence[RowRule], *, rules: RuleSet, returning: ReturningRows, tally: _RowTally
) -> Marks:
    """The file's rows to quarantine; every offence is counted, except those of rows that people took back."""
    marks: Marks = {}
    row = 0
    for batch in read_all_columns(path):
        exempt = returning.find_exempt(batch)
        hits: dict[int, dict[str, str]] = {}
        for rule in row_rules:
            try:
                for at, reason in rule.find(batch):
                    if at not in exempt:
                        reasons = hits.setdefault(at, {})
                        reasons[rule.name] = f"{reasons[rule.name]}; {reason}" if rule.name in reasons else reason
            except (KeyError, pa.ArrowException) as error:
                raise ContractError(f"{path} cannot be judged by rule {rule.name}: {first_line(error)}") from error
        for at, reasons in hits.items():
            tally.hits.update(reasons.keys())
            for name, reason in reasons.items():
                if len(examples := tally.examples.setdefault(name, [])) < NUM_EXAMPLES:
                    examples.append(reason)
            if gone := {name: reason for name, reason in reasons.items() if rules.actions[name] == QUARANTINE}:
                first = next(iter(gone))
                marks[row + at] = (first, "; ".join(gone.values()))
                tally.quarantined[first] += 1
        row += batch.num_rows
    return marks


def _split_file(path: Path, marks: Marks, *, rest: Path, gone: Path) -> None:
    schema = pq.read_schema(path)
    with_reason = schema.append(pa.field(RULE_COLUMN, pa.string())).append(pa.field(REASON_COLUMN, pa.string()))
    gone.parent.mkdir(exist_ok=True)
    row = 0
    with pq.ParquetWriter(rest, schema) as to_rest, pq.ParquetWriter(gone, with_reason) as to_gone:
        for batch in read_all_columns(path):
            here = [at for at in range(batch.num_rows) if row + at in marks]
            stays = np.ones(batch.num_rows, dtype=bool)
            stays[here] = False
            to_rest.write_table(pa.Table.from_batches([batch.filter(pa.array(stays))], schema))
            if here:
                texts = [pa.array(column, pa.string()) for column in zip(*(marks[row + at] for at in here))]
                left = batch.filter(pa.array(~stays))
                to_gone.write_table(pa.Table.from_arrays([*left.columns, *texts], schema=with_reason))
            row += batch.num_rows


def _link_file(path: Path, target: Path) -> None:
    """The same file under another name; a copy if the folders are on two disks."""
    try:
        os.link(path, target)
    except OSError:
        shutil.copyfile(path, target)


def _judge_tally(tally: _RowTally, rules: RuleSet, *, num_gone: int, num_back: int, num_rows: int) -> list[Finding]:
    found: list[Finding] = []
    for name, hits in tally.hits.items():
        num_quarantined = tally.quarantined[name]
        gone = f", {num_quarantined} of them quarantined by it" if rules.actions[name] == QUARANTINE else ""
        text = f"rule {name} is broken by {hits} of {num_rows} rows{gone}; first: {'; '.join(tally.examples[name])}"
        found += [replace(finding, num_quarantined=num_quarantined) for finding in rules.find(name, DATASET, text)]
    limit = rules.settings.max_quarantined_fraction
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
    read from the store and learned beside the window, as long as no model of the champion's line has learned it: a
    round that took it and was refused has lost nothing. A model's line is known by its parents, what it learned by its
    dataset's digest.
    """

    def __init__(self, store: Path, champion: Path | None, raw: RawDataset) -> None:
        """Reads what is stored.

        Args:
            store: The model store.
            champion: Folder of the model whose line the round continues; None = none.
            raw: The round's rows.

        Raises:
            ContractError: what is stored cannot be read.
        """
        self._store, self._raw = store, raw
        replayed, learned = quarantine_store.read_replayed(store), _learned_batches(store, champion)
        runs = {kept.run: kept for kept in quarantine_store.read_quarantined_runs(store)}
        end = moment_of(raw.last_event_time)
        # Rows later than the window are not learned by this round; they wait for one that reaches them.
        self.taken = sorted(each for each in replayed - learned if moment_of(runs[each.run].last_event_time) <= end)
        """What is all in this round's dataset, from the store or from the lake."""
        self._replayed, self._seen = self._keys_of(replayed), self._keys_of(learned)

    def find_exempt(self, batch: pa.RecordBatch) -> set[int]:
        """Positions of the rows of the round that no rule touches; they are not read from the store as well."""
        if not self._replayed:
            return set()
        keys = _row_keys(batch)
        exempt = {at for at, key in enumerate(keys) if key in self._replayed}
        self._seen.update(keys[at] for at in exempt)
        return exempt

    def write(self, path: Path) -> int:
        """Writes the rows that lie before the window, each once and ordered by time; 0 = none, and no file."""
        begin, found = moment_of(self._raw.first_event_time), []
        for batch in self._read_rows(self.taken):
            times, fresh = batch.column(criteo.EVENT_TIME).to_pylist(), []
            for at, key in enumerate(_row_keys(batch)):
                if key not in self._seen and times[at] < begin:
                    self._seen.add(key)
                    fresh.append(at)
            found.append(pa.Table.from_batches([batch]).take(pa.array(fresh, pa.int64())))
        rows = pa.concat_tables(found).drop([RULE_COLUMN, REASON_COLUMN]) if found else None
        if rows is None or not rows.num_rows:
            return 0
        pq.write_table(rows.take(pc.sort_indices(rows, [(criteo.EVENT_TIME, "ascending")])), path)
        return int(rows.num_rows)

    def _keys_of(self, batches: Iterable[QuarantinedBatch]) -> set[RowKey]:
        return {key for batch in self._read_rows(batches) for key in _row_keys(batch)}

    def _read_rows(self, batches: Iterable[QuarantinedBatch]) -> Iterator[pa.RecordBatch]:
        for run, rule in batches:
            for path in sorted(quarantine_store.rows_folder(self._store, run).glob("*.parquet")):
                for batch in read_all_columns(path):
                    yield batch.filter(pc.equal(batch.column(RULE_COLUMN), rule))


def _row_keys(batch: pa.RecordBatch) -> list[RowKey]:
    return list(zip(batch.column(criteo.REQUEST_ID).to_pylist(), batch.column(criteo.ROW).to_pylist()))


def _learned_batches(store: Path, champion: Path | None) -> set[QuarantinedBatch]:
    """What the champion or a model before it in its line has learned."""
    line, folder = set(), champion
    while folder is not None and (folder / Model.MANIFEST).exists():
        model = Model.read(folder / Model.MANIFEST)
        line.add(model.raw_digest)
        folder = model_store.model_folder(store, model.parent_model_id) if model.parent_model_id else None
    return {batch for digest, taken in quarantine_store.read_taken(store) if digest in line for batch in taken}


# -- the rules about single rows


Offences = Iterator[tuple[int, str]]
"""Position of a row in the batch, and why it offends."""


class RowRule(NamedTuple):
    """One rule, ready to look at batches."""

    name: str
    find: Callable[[pa.RecordBatch], Offences]


class ValueBounds(NamedTuple):
    """What a number may be; NaN and infinity offend if they are disallowed, whatever the bounds."""

    low: float = -math.inf
    high: float = math.inf
    disallow_nan: bool = False
    disallow_inf: bool = False


def make_row_rules(
    rules: RuleSet, schema: Any | None, *, excluded: Container[str] = ()
) -> tuple[list[RowRule], list[str]]:
    """The rules that are on, in the order of `rules.RULES`, and the names of those with nothing to compare with.

    Args:
        rules: Actions and thresholds.
        schema: In force; None in a first run, which is yet to infer it.
        excluded: Features that the run left out.

    Raises:
        ContractError: a named day is not a date.
    """
    ready, idle = [], []
    for name in rules.row_rules():
        if name == "label_kind":
            ready.append(RowRule(name, _find_wrong_labels))
        elif name == "named_rows":
            ready.append(RowRule(name, _make_named_rows(rules.settings.request_ids, rules.settings.days)))
        elif schema is None:
            idle.append(name)
        else:
            ready.append(RowRule(name, _make_domain(schema, excluded)))
    return ready, idle


def _find_wrong_labels(batch: pa.RecordBatch) -> Offences:
    labels = batch.column(criteo.LABEL)
    known = pc.is_in(labels, value_set=pa.array([0, 1], labels.type))  # null is not in it
    for at in _positions(pc.invert(known)):
        yield at, f"label is {labels[at].as_py()!r}, expected 0 or 1"


def _make_named_rows(request_ids: tuple[str, ...], days: tuple[str, ...]) -> Callable[[pa.RecordBatch], Offences]:
    begins = [_first_microsecond(day) for day in days]

    def find(batch: pa.RecordBatch) -> Offences:
        if request_ids:
            ids = batch.column(criteo.REQUEST_ID)
            for at in _positions(pc.is_in(ids, value_set=pa.array(request_ids, pa.string()))):
                yield at, f"request {ids[at].as_py()!r} is named by the rule"
        if begins:
            times = batch.column(criteo.EVENT_TIME).cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
            for day, begin in zip(days, begins):
                for at in np.flatnonzero((times >= begin) & (times < begin + 86_400_000_000)):
                    yield int(at), f"day {day} is named by the rule"

    return find


def _first_microsecond(day: str) -> int:
    try:
        begin = datetime.strptime(day, "%Y-%m-%d").replace(tzinfo=timezone.utc)
    except ValueError as error:
        raise ContractError(f"rule named_rows: day is {day!r}, expected YYYY-MM-DD") from error
    return criteo.microseconds(begin.timestamp())


def _make_domain(schema: Any, excluded: Container[str]) -> Callable[[pa.RecordBatch], Offences]:
    lists = {domain.name: set(domain.value) for domain in schema.string_domain}
    bounds: dict[str, ValueBounds] = {}
    allowed: dict[str, set[str]] = {}
    for feature in schema.feature:
        kind = feature.WhichOneof("domain_info")
        if feature.name in excluded:
            continue
        if kind in ("float_domain", "int_domain") and feature.name not in criteo.CATEGORICAL:
            domain = getattr(feature, kind)
            bounds[feature.name] = ValueBounds(
                low=float(domain.min) if domain.HasField("min") else -math.inf,
                high=float(domain.max) if domain.HasField("max") else math.inf,
                disallow_nan=getattr(domain, "disallow_nan", False),
                disallow_inf=getattr(domain, "disallow_inf", False),
            )
        elif kind in ("string_domain", "domain"):
            named = lists.get(feature.domain, set())
            allowed[feature.name] = set(feature.string_domain.value) if kind == "string_domain" else named

    def find(batch: pa.RecordBatch) -> Offences:
        yield from _find_outside(batch, bounds)
        for name in allowed.keys() & set(batch.schema.names):
            texts = batch.column(name).cast(pa.string())
            known = pc.is_in(texts, value_set=pa.array(sorted(allowed[name]), pa.string()))
            for at in _positions(pc.and_(pc.invert(known), pc.is_valid(texts))):
                yield at, f"{name} is {texts[at].as_py()}, expected one of the schema's {len(allowed[name])} values"

    return find


def _find_outside(batch: pa.RecordBatch, bounds: dict[str, ValueBounds]) -> Offences:
    for name in batch.schema.names:
        if name not in bounds:
            continue
        low, high, disallow_nan, disallow_inf = bounds[name]
        values = batch.column(name).cast(pa.float64())
        numbers: NDArray[np.float64] = values.fill_null(math.nan).to_numpy(zero_copy_only=False)
        wrong = (numbers < low) | (numbers > high)
        if disallow_nan:
            wrong |= np.isnan(numbers) & values.is_valid().to_numpy(zero_copy_only=False)
        if disallow_inf:
            wrong |= np.isinf(numbers)
        for at in np.flatnonzero(wrong):
            yield int(at), f"{name} is {numbers[at]:g}, expected {low:g} to {high:g}"


def _positions(mask: Any) -> list[int]:
    return [int(at) for at in np.flatnonzero(mask.fill_null(False).to_numpy(zero_copy_only=False))]
