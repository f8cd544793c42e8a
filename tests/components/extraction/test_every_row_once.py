"""Every row of the lake is learned exactly once, whatever files come late and whichever rounds fail or are refused.

Judged by a ledger of its own: which row lies in which files, when these came, and what was learned by whom.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta, timezone

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.contracts import criteo
from components.contracts.manifests import RawDataset
from tests.support.lakes import keys_in

START = datetime(2026, 3, 1, tzinfo=timezone.utc)
DAYS, ROWS, ROUNDS = 4, 320, 6
File = tuple[date, str]


@dataclass
class Ledger:
    """What there is, what has come, and what the accepted rounds learned."""

    times: list[datetime]
    files: dict[File, list[int]] = field(default_factory=dict)
    """Rows, by number."""
    comes_at: dict[File, int] = field(default_factory=dict)
    """Round before which the file comes."""
    watermark: datetime | None = None
    known: set[File] = field(default_factory=set)
    """Files that were there in the last accepted round."""
    learned: Counter[int] = field(default_factory=Counter)
    passed_over: set[int] = field(default_factory=set)
    """Rows that came when their day was too old."""

    def here(self, number: int) -> set[File]:
        return {file for file, at in self.comes_at.items() if at <= number}

    def expected(self, number: int, late_days: int) -> tuple[set[int], set[int]]:
        """Rows that the round is to learn by their time, and late ones."""
        fresh, late = set(), set()
        for file in self.here(number):
            for row in self.files[file]:
                if self.watermark is None or self.times[row] > self.watermark:
                    fresh.add(row)
                elif file not in self.known and row not in self.learned:
                    in_time = file[0] >= self.watermark.date() - timedelta(days=late_days)
                    (late if in_time else self.passed_over).add(row)
        return fresh, late


def make_ledger(source: random.Random, times: list[datetime]) -> Ledger:
    """Each row in one file of its day, one in twelve in another too; files hold about five hours, and come anyhow."""
    ledger = Ledger(times)
    for row, time in enumerate(times):
        hour = time.hour + source.gauss(0, 2)
        names = {f"part-{int(hour // 5) % 5}.parquet"} | ({"again.parquet"} if source.random() < 1 / 12 else set())
        for name in names:
            ledger.files.setdefault((time.date(), name), []).append(row)
    for file in ledger.files:
        map_in_order = (file[0] - START.date()).days * ROUNDS / DAYS
        ledger.comes_at[file] = min(ROUNDS - 2, max(0, int(map_in_order + source.choice([-1, 0, 0, 0, 1, 2, 3]))))
    return ledger


@pytest.mark.parametrize("seed", range(4))
def test_a_chain_of_rounds_learns_each_row_once(seed, flags, run_main, released, raw_table, tmp_path):
    source = random.Random(seed)
    table = raw_table(ROWS, seed=seed, start=START.timestamp(), seconds=DAYS * 86_400)
    ledger = make_ledger(source, table[criteo.EVENT_TIME].to_pylist())
    number_of = {key: i for i, key in enumerate(zip(table["request_id"].to_pylist(), table["row"].to_pylist()))}
    late_days, attribution_hours = source.choice([1, 2, DAYS]), source.choice([0, 8])
    flags |= {"--lake": (tmp_path / "chain").as_uri(), "--late-days": str(late_days), "--replay-share": "0.1"}
    flags |= {"--replay-days": "1"}
    late_in_all = 0
    for number in range(ROUNDS):
        for day, name in sorted(ledger.here(number) - ledger.here(number - 1)):
            folder = tmp_path / "chain" / f"day={day}"
            folder.mkdir(parents=True, exist_ok=True)
            rows = source.sample(ledger.files[day, name], len(ledger.files[day, name]))
            pq.write_table(table.take(pa.array(rows)), folder / name, row_group_size=16)
        last = number == ROUNDS - 1
        asked = {"attribution_hours": "0" if last else str(attribution_hours)}
        fate = "accepted" if last or number == 0 else source.choice(["accepted", "accepted", "refused", "failed"])
        if last:  # Something new, without which a round has no window.
            next_day = START + timedelta(days=DAYS)
            folder = tmp_path / "chain" / f"day={next_day.date()}"
            folder.mkdir()
            new = raw_table(20, seed=ROWS + seed, start=next_day.timestamp(), seconds=60)
            pq.write_table(new, folder / "new.parquet")
        if fate == "failed":
            assert run_main(flags, run=f"round {number}", max_malformed_fraction="2") == 2
            continue
        if run_main(flags, run=f"round {number}", **asked) != 0:
            assert not last
            continue  # Too few new rows.
        dataset = RawDataset.read(flags["--output"])
        if source.random() < 0.3:  # A task that is tried again.
            assert run_main(flags, run=f"round {number}", **asked) == 0
            assert RawDataset.read(flags["--output"]) == dataset
        fresh, late = ledger.expected(number, late_days)
        if not last:
            newest = datetime.fromisoformat(dataset.last_event_time)
            youngest = max(ledger.times[row] for file in ledger.here(number) for row in ledger.files[file])
            mature = youngest - timedelta(hours=attribution_hours)
            fresh = {row for row in fresh if ledger.times[row] <= mature}
            assert newest == max(ledger.times[row] for row in fresh)
        found = [number_of.get(key) for uri in (dataset.train_uri, dataset.holdout_uri) for key in keys_in(uri)]
        found = [row for row in found if row is not None]
        assert Counter(found) == Counter({*fresh, *late})
        assert set(found[: dataset.num_late_rows]) == late
        assert sorted(found) == found, "rows come in the order of time"
        assert not late & {number_of.get(key) for uri in (dataset.replay_uri,) if uri for key in keys_in(uri)}
        if fate == "refused":
            continue
        late_in_all += len(late)
        ledger.learned.update(found)
        ledger.watermark, ledger.known = datetime.fromisoformat(dataset.last_event_time), ledger.here(number)
        released(dataset.last_event_time, model_id=f"m{number}", version=number + 1, files=dataset.files)
    assert set(ledger.learned.values()) == {1}
    lost = {*range(ROWS)} - ledger.learned.keys()
    assert lost <= ledger.passed_over
    assert late_in_all > 0
    if late_days == DAYS:
        assert not lost
