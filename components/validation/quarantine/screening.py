"""The training rows without those that a rule sets aside, as a dataset of its own.

A pass over the files that only happens where a rule about rows is on, or rows of an earlier quarantine come back. It
holds one batch of rows, and the places of one file's offending rows. A file without such rows is linked, not written
again. Rows held out from training are not screened: the gate judges by what happened.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from components.contracts import criteo
from components.contracts.manifests import RawDataset
from components.runtime.durable import sha256_tree
from components.runtime.errors import ContractError, first_line
from components.validation.quarantine.row_rules import RowRule
from components.validation.rows import BATCH_ROWS
from components.validation.rules import DATASET, INFO, QUARANTINE, Finding, Judging

logger = logging.getLogger(__name__)

TRAIN, ASIDE = "train", "quarantine"
RULE_COLUMN, REASON_COLUMN = "quarantine_rule", "quarantine_reason"
KEYS = (criteo.REQUEST_ID, criteo.ROW)
NUM_EXAMPLES = 3

Key = tuple[str, int]
Marks = dict[int, tuple[str, str]]
"""Row of a file -> rule and reason."""


@dataclass
class Screened:
    """What became of the rows."""

    dataset: RawDataset
    """`raw` itself where no row went or came."""
    files: list[Path]
    """The rows to be judged, where they lie until the step's folder is complete."""
    findings: list[Finding] = field(default_factory=list)
    num_by_rule: dict[str, int] = field(default_factory=dict)
    """Rows set aside, by the rule that stands beside them."""


@dataclass
class _Tally:
    hits: Counter[str] = field(default_factory=Counter)
    aside: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def saw(self, rule: str, reason: str) -> None:
        self.hits[rule] += 1
        if len(seen := self.examples.setdefault(rule, [])) < NUM_EXAMPLES:
            seen.append(reason)


def screen(
    raw: RawDataset,
    files: Sequence[Path],
    aside: Path,
    folder: Path,
    *,
    judging: Judging,
    rules: Sequence[RowRule],
    exempt: Set[Key] = frozenset(),
    come_back: Callable[[Path], int] | None = None,
) -> Screened:
    """Splits the rows of `files` into `aside/train` and `aside/quarantine`, where any of them goes or comes.

    Args:
        raw: What the rows belong to.
        files: Its training rows, in order.
        aside: The step's folder while it is made.
        folder: The step's folder, which manifests name.
        judging: Says what each rule does.
        rules: The rules that are on.
        exempt: Rows that no rule touches: people took them back.
        come_back: Writes rows of earlier quarantines to a file, and says how many; 0 = it wrote none.

    Raises:
        ContractError: a file cannot be read, or lacks a column that a rule asks for.
    """
    tally = _Tally()
    (aside / TRAIN).mkdir()
    for path in files:
        marks = _marks_of(path, rules, judging, exempt, tally)
        if marks:
            _split(path, marks, rest=aside / TRAIN / path.name, gone=aside / ASIDE / path.name)
        else:
            _link(path, aside / TRAIN / path.name)
    num_aside = sum(tally.aside.values())
    # Older than all others; so is its name in the order of names.
    num_back = come_back(aside / TRAIN / "00000-replayed.parquet") if come_back else 0
    findings = _findings(tally, num_aside, raw.num_train_rows, num_back, judging)
    if not num_aside and not num_back:
        shutil.rmtree(aside / TRAIN)
        return Screened(raw, list(files), findings)
    logger.info("%d rows are set aside, %d come back", num_aside, num_back)
    trees = f"{raw.digest}\n{sha256_tree(aside / TRAIN)}\n"
    dataset = replace(
        raw,
        train_uri=(folder / TRAIN).as_uri(),
        num_train_rows=raw.num_train_rows - num_aside + num_back,
        digest=hashlib.sha256(trees.encode()).hexdigest(),
        num_quarantined=num_aside,
        quarantine_uri=(folder / ASIDE).as_uri() if num_aside else None,
    )
    return Screened(dataset, sorted((aside / TRAIN).iterdir()), findings, dict(tally.aside))


def _marks_of(path: Path, rules: Sequence[RowRule], judging: Judging, exempt: Set[Key], tally: _Tally) -> Marks:
    marks: Marks = {}
    row = 0
    for batch in read_whole(path):
        hits: dict[int, list[tuple[str, str]]] = {}
        for rule in rules:
            try:
                for at, reason in rule.find(batch):
                    hits.setdefault(at, []).append((rule.name, reason))
            except (KeyError, pa.ArrowException) as error:
                raise ContractError(f"{path} cannot be judged by rule {rule.name}: {first_line(error)}") from error
        for at, found in hits.items():
            if exempt and _key(batch, at) in exempt:
                continue
            for name in dict.fromkeys(name for name, _ in found):
                tally.saw(name, next(reason for each, reason in found if each == name))
            if aside := [each for each in found if judging.actions[each[0]] == QUARANTINE]:
                marks[row + at] = (aside[0][0], "; ".join(reason for _, reason in aside))
                tally.aside[aside[0][0]] += 1
        row += batch.num_rows
    return marks


def _key(batch: pa.RecordBatch, at: int) -> Key:
    return batch.column(criteo.REQUEST_ID)[at].as_py(), batch.column(criteo.ROW)[at].as_py()


def read_whole(path: Path) -> Any:
    """The rows of a Parquet file with all columns, by batches.

    Raises:
        ContractError: the file is damaged.
    """
    try:
        yield from pq.ParquetFile(path).iter_batches(batch_size=BATCH_ROWS)
    except (pa.ArrowException, OSError) as error:
        raise ContractError(f"{path} cannot be read as Parquet: {first_line(error)}") from error


def _split(path: Path, marks: Marks, *, rest: Path, gone: Path) -> None:
    schema = pq.read_schema(path)
    with_reason = schema.append(pa.field(RULE_COLUMN, pa.string())).append(pa.field(REASON_COLUMN, pa.string()))
    gone.parent.mkdir(exist_ok=True)
    row = 0
    with pq.ParquetWriter(rest, schema) as to_rest, pq.ParquetWriter(gone, with_reason) as to_gone:
        for batch in read_whole(path):
            here = [at for at in range(batch.num_rows) if row + at in marks]
            sound = np.ones(batch.num_rows, dtype=bool)
            sound[here] = False
            to_rest.write_table(pa.Table.from_batches([batch.filter(pa.array(sound))], schema))
            if here:
                why = [marks[row + at] for at in here]
                texts = [pa.array([each[i] for each in why], pa.string()) for i in range(2)]
                left = batch.filter(pa.array(~sound))
                to_gone.write_table(pa.Table.from_arrays([*left.columns, *texts], schema=with_reason))
            row += batch.num_rows


def _link(path: Path, target: Path) -> None:
    """The same file under another name; a copy where the folders lie on two disks."""
    try:
        os.link(path, target)
    except OSError:
        shutil.copyfile(path, target)


def _findings(tally: _Tally, num_aside: int, num_rows: int, num_back: int, judging: Judging) -> list[Finding]:
    found: list[Finding] = []
    for name, hits in tally.hits.items():
        gone = f", {tally.aside[name]} of them set aside under it" if judging.actions[name] == QUARANTINE else ""
        text = f"rule {name} is broken by {hits} of {num_rows} rows{gone}; first: {'; '.join(tally.examples[name])}"
        aside = {"num_quarantined": tally.aside[name]} if gone else {}
        found += [{**finding, **aside} for finding in judging.find(DATASET, "rule", name, text)]
    limit = judging.parameters["quarantined_share"]["max_quarantined_fraction"]
    if num_aside > limit * num_rows:
        text = f"{num_aside} of {num_rows} rows are set aside, expected at most {limit:.2%}"
        found += judging.find(DATASET, "rule", "quarantined_share", text)
    if num_back:
        text = f"{num_back} rows of earlier quarantines, which people took back, are learnt with these"
        found += judging.find(DATASET, "rule", "quarantine_replayed", text, at_most=INFO)
    return found
