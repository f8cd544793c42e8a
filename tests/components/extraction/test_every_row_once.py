"""Checks that a lineage trains on every row of the lake exactly once.

Files arrive late. Some rounds fail, are refused or are retried. Some rounds start from scratch, and
some rounds start from an older parent. The newest rows of every round are held out from training.
The test keeps its own ledger of the rows in each file, the arrival of each file, and the rows on
which each lineage was trained. The test counts the rows in the folders that preprocessing reads for
training. The counts in manifests are not used. `tests/crossings/test_rounds.py` counts the rows
that the training step reads.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta, timezone

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evergreen.contracts import raw_rows
from evergreen.contracts.manifests import RawDataset
from evergreen.storage.uris import local_path

START = datetime(2026, 3, 1, tzinfo=timezone.utc)
DAYS, ROWS, NEW_ROWS, ROUNDS = 4, 320, 20, 7
File = tuple[date, str]
NUMBER = "price"
"""The column with a row's number."""


@dataclass
class Lineage:
    """Rows on which one model was trained, directly or through its parents."""

    watermark: datetime | None = None
    known: set[File] = field(default_factory=set)
    """Files that had already arrived when the model was trained."""
    trained: Counter[int] = field(default_factory=Counter)
    passed_over: set[int] = field(default_factory=set)
    """Rows that no run used, because their files arrived too late. The day of such a row was older
    than `late_days`, or older than the days that a run from scratch reads."""


@dataclass
class Ledger:
    """All rows, the files that have arrived, and the training rows of accepted rounds."""

    times: list[datetime]
    requests: list[str]
    files: dict[File, list[int]] = field(default_factory=dict)
    """Rows by number."""
    first_round: dict[File, int] = field(default_factory=dict)
    """Number of the first round that can read each file."""
    lineages: dict[str, Lineage] = field(default_factory=dict)
    """Lineages by model id, newest last."""

    def here(self, number: int) -> set[File]:
        return {file for file, at in self.first_round.items() if at <= number}

    def expected(
        self, number: int, lineage: Lineage, late_days: int
    ) -> tuple[set[int], set[int], set[int]]:
        """Return the new rows, the late rows, and the rows that arrived too late for the round."""
        fresh, late, lost = set(), set(), set()
        known = {row for file in lineage.known for row in self.files[file]}
        for file in self.here(number):
            for row in self.files[file]:
                if lineage.watermark is None or self.times[row] > lineage.watermark:
                    fresh.add(row)
                elif file not in lineage.known and row not in known:
                    in_time = file[0] >= lineage.watermark.date() - timedelta(days=late_days)
                    (late if in_time else lost).add(row)
        return fresh, late, lost - lineage.trained.keys()

    def requests_of(self, rows) -> set[str]:
        return {self.requests[row] for row in rows}


def make_ledger(source: random.Random, table) -> Ledger:
    """Put each row into one file of its day, and one row in twelve also into a second file.

    Each file contains the rows of about five hours. Files arrive in any order.
    """
    ledger = Ledger(table[raw_rows.EVENT_TIME].to_pylist(), table[raw_rows.REQUEST_ID].to_pylist())
    for row, time in enumerate(ledger.times[:ROWS]):
        hour = time.hour + source.gauss(0, 2)
        names = {f"part-{int(hour // 5) % 5}.parquet"} | (
            {"again.parquet"} if source.random() < 1 / 12 else set()
        )
        for name in names:
            ledger.files.setdefault((time.date(), name), []).append(row)
    for file in ledger.files:
        map_in_order = (file[0] - START.date()).days * ROUNDS / DAYS
        ledger.first_round[file] = min(
            ROUNDS - 2, max(0, int(map_in_order + source.choice([-1, 0, 0, 0, 1, 2, 3])))
        )
    # Without these new rows, the last round has no window.
    new = (START + timedelta(days=DAYS)).date(), "new.parquet"
    ledger.files[new], ledger.first_round[new] = list(range(ROWS, ROWS + NEW_ROWS)), ROUNDS - 1
    return ledger


def numbered_rows(raw_table, seed: int, request_rows: int):
    """Return a table with a row every 18 minutes, followed by the new rows.

    The column `NUMBER` contains the number of each row.
    """
    old = raw_table(
        ROWS, seed=seed, start=START.timestamp(), seconds=DAYS * 86_400, request_rows=request_rows
    )
    start = (START + timedelta(days=DAYS)).timestamp()
    table = pa.concat_tables(
        [old, raw_table(NEW_ROWS, seed=ROWS + seed, start=start, seconds=60, request_rows=2)]
    )
    numbers = pa.array(np.arange(len(table), dtype=np.float32))
    return table.set_column(table.column_names.index(NUMBER), NUMBER, numbers)


def rows_read(uri: str | None, num_rows: int) -> list[int]:
    """Return the column `NUMBER` of a folder's rows, in the order of preprocessing.

    Preprocessing reads all files in the order of their names. It reads as many rows as the manifest
    states.
    """
    paths = sorted(local_path(uri).glob("*.parquet")) if uri else []
    numbers = [
        int(number)
        for path in paths
        for number in pq.ParquetFile(path).read([NUMBER])[NUMBER].to_pylist()
    ]
    assert len(numbers) == num_rows
    return numbers


@pytest.mark.parametrize(
    "seed", [0, 1, 7, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 7))]
)
def test_chain_of_rounds_trains_on_each_row_once(
    seed, flags, run_main, released, raw_table, tmp_path
):
    source = random.Random(seed)
    table = numbered_rows(raw_table, seed, request_rows=source.choice([1, 3, 7]))
    ledger = make_ledger(source, table)
    late_days, attribution_hours = source.choice([1, 2, DAYS]), source.choice([0, 8])
    flags |= {
        "--lake": (tmp_path / "chain").as_uri(),
        "--late-days": str(late_days),
        "--replay-share": "0.1",
    }
    flags |= {"--replay-days": "1"}
    for number in range(ROUNDS):
        for day, name in sorted(ledger.here(number) - ledger.here(number - 1)):
            folder = tmp_path / "chain" / f"day={day}"
            folder.mkdir(parents=True, exist_ok=True)
            rows = source.sample(ledger.files[day, name], len(ledger.files[day, name]))
            pq.write_table(table.take(pa.array(rows)), folder / name, row_group_size=16)
        last = number == ROUNDS - 1
        full_days = 0 if last else source.choice([0, 0, 2])
        parent = (
            source.choice(["current"] * 5 + ["none", *ledger.lineages]) if not last else "current"
        )
        parameters = {
            "parent": parent,
            "full_days": str(full_days),
            "holdout_fraction": str(source.choice([0.1, 0.3])),
        }
        parameters["attribution_hours"] = "0" if last else str(attribution_hours)
        fate = (
            "accepted"
            if last or number == 0
            else source.choice(["accepted", "accepted", "refused", "failed"])
        )
        if fate == "failed":
            assert run_main(flags, run=f"round {number}", max_malformed_fraction="2") == 2
            continue
        if run_main(flags, run=f"round {number}", **parameters) != 0:
            assert not last
            continue  # the window has too few new rows
        dataset = RawDataset.read(flags["--output"])
        if source.random() < 0.3:  # Retry the task.
            assert run_main(flags, run=f"round {number}", **parameters) == 0
            assert RawDataset.read(flags["--output"]) == dataset
        lineage = ledger.lineages.get(dataset.parent_model_id or "", Lineage())
        fresh, late, lost = ledger.expected(number, lineage, late_days)
        if not last:
            youngest = max(
                ledger.times[row] for file in ledger.here(number) for row in ledger.files[file]
            )
            mature = youngest - timedelta(hours=attribution_hours)
            fresh = {row for row in fresh if ledger.times[row] <= mature}
            if full_days and dataset.parent_model_id is None:
                older = {
                    row for row in fresh if ledger.times[row] <= mature - timedelta(days=full_days)
                }
                fresh, lost = fresh - older, lost | older
            assert datetime.fromisoformat(dataset.last_event_time) == max(
                ledger.times[row] for row in fresh
            )
        watermark = datetime.fromisoformat(dataset.watermark)
        trained = rows_read(dataset.train_uri, dataset.num_train_rows)
        holdout = rows_read(dataset.holdout_uri, dataset.num_holdout_rows)
        newer = {row for row in fresh if ledger.times[row] > watermark}
        assert Counter(trained) == Counter({*fresh, *late} - newer)
        assert set(trained[: dataset.num_late_rows]) == late
        assert sorted(trained) == trained, "rows must be in time order"
        assert len(holdout) + dataset.num_straddling_rows == len(newer)
        assert holdout
        replayed = rows_read(dataset.replay_uri, dataset.num_replay_rows)
        assert not {*trained, *holdout} & {*replayed}
        after = Lineage(
            watermark,
            ledger.here(number),
            lineage.trained + Counter(trained),
            lineage.passed_over | lost,
        )
        baselines = [
            after,
            *([ledger.lineages[dataset.champion_model_id]] if dataset.champion_model_id else []),
        ]
        for each in baselines:
            assert not ledger.requests_of(holdout) & ledger.requests_of(each.trained)
        assert ledger.requests_of(newer - {*holdout}) <= ledger.requests_of([*trained, *replayed])
        if fate == "refused":
            continue
        ledger.lineages[f"m{number}"] = after
        released(
            dataset.watermark,
            model_id=f"m{number}",
            version=number + 1,
            files=dataset.files,
        )
    for lineage in ledger.lineages.values():
        assert set(lineage.trained.values()) == {1}
    newest = ledger.lineages[f"m{ROUNDS - 1}"]
    assert {
        row for row, time in enumerate(ledger.times) if time <= newest.watermark
    } - newest.trained.keys() <= (newest.passed_over)
