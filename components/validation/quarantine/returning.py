"""The way back of rows that people took out of quarantine: into the training rows of the next round, once.

A row that lies in a round's window, or comes late beside it, comes from the lake: no rule touches it any more. Another
earlier one is read from the store and learnt beside the window, as long as no model of the champion's line has learnt
it: a round that took it and was refused has lost nothing. Which line a model is of is told by its parents, what it
learnt by its dataset's digest.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from components.contracts import criteo
from components.contracts.manifests import Model, RawDataset
from components.storage.uris import local_path
from components.store import models as model_store
from components.store.promotion_journal import moment_of
from components.validation.quarantine import kept
from components.validation.quarantine.screening import REASON_COLUMN, RULE_COLUMN, Key, read_whole


class Returning:
    """The rows that people took back, as one round meets them.

    Args:
        store: The model store.
        champion: Folder of the model whose line the round continues; None = none.
        raw: The round's rows.

    Raises:
        ContractError: what is kept cannot be read.
    """

    def __init__(self, store: Path, champion: Path | None, raw: RawDataset) -> None:
        self._store, self._raw = store, raw
        self._back = kept.taken_back(store)
        self.exempt: set[Key] = set()
        """Rows that no rule touches."""
        for run, rules in self._back.items():
            for batch in self._rows(run, rules):
                self.exempt.update(_keys(batch))
        learnt = _learnt(store, champion)
        self._learnt: set[Key] = set()
        for run, rules in learnt.items():
            for batch in self._rows(run, rules):
                self._learnt.update(_keys(batch))
        self.taken: dict[str, list[str]] = {}
        """Runs and rules whose rows are all in this round's dataset, from the store or from the lake."""
        end = moment_of(raw.last_event_time)
        for run, rules in self._back.items():
            left = sorted(rules - learnt.get(run, set()))
            # Rows later than the window are not learnt by this round; their batch waits for one that reaches it.
            if left and moment_of(kept.read_batch(store, run).last_event_time) <= end:
                self.taken[run] = left

    def write(self, path: Path) -> int:
        """Writes the rows that lie before the window, each once and in the order of their times; 0 = none, no file."""
        begin, seen, found = moment_of(self._raw.first_event_time), self._learnt | set(self._late()), []
        for run, rules in self.taken.items():
            for batch in self._rows(run, set(rules)):
                times = batch.column(criteo.EVENT_TIME).to_pylist()
                fresh = []
                for at, key in enumerate(_keys(batch)):
                    if key not in seen and times[at] < begin:
                        seen.add(key)
                        fresh.append(at)
                found.append(pa.Table.from_batches([batch]).take(pa.array(fresh, pa.int64())))
        rows = pa.concat_tables(found).drop([RULE_COLUMN, REASON_COLUMN]) if found else None
        if rows is None or not rows.num_rows:
            return 0
        pq.write_table(rows.take(pc.sort_indices(rows, [(criteo.EVENT_TIME, "ascending")])), path)
        return int(rows.num_rows)

    def _late(self) -> Iterator[Key]:
        """The rows of this round that are older than its window."""
        left = self._raw.num_late_rows
        for path in sorted(local_path(self._raw.train_uri).glob("*.parquet")) if left else ():
            for batch in read_whole(path):
                yield from _keys(batch.slice(0, left))
                left -= min(left, batch.num_rows)
                if not left:
                    return

    def _rows(self, run: str, rules: set[str]) -> Iterator[Any]:
        for path in sorted(kept.rows_folder(self._store, run).glob("*.parquet")):
            for batch in read_whole(path):
                yield batch.filter(pc.is_in(batch.column(RULE_COLUMN), pa.array(sorted(rules))))


def _keys(batch: Any) -> list[Key]:
    return list(zip(batch.column(criteo.REQUEST_ID).to_pylist(), batch.column(criteo.ROW).to_pylist()))


def _learnt(store: Path, champion: Path | None) -> dict[str, set[str]]:
    """Runs and rules whose replayed rows the champion or a model before it in its line has learnt."""
    line = set(_digests(store, champion))
    learnt: dict[str, set[str]] = {}
    for digest, batches in kept.read_taken(store):
        if digest in line:
            for run, rules in batches.items():
                learnt.setdefault(run, set()).update(rules)
    return learnt


def _digests(store: Path, champion: Path | None) -> Iterator[str]:
    folder = champion
    while folder is not None and (folder / Model.MANIFEST).exists():
        model = Model.read(folder / Model.MANIFEST)
        yield model.raw_digest
        folder = model_store.model_folder(store, model.parent_model_id) if model.parent_model_id else None
