"""Which event a row is: rows written again, files ingested again, ids that are no keys, and clocks that are ahead."""

import json
import random
from datetime import datetime, timedelta, timezone

import pyarrow.parquet as pq
import pytest

from components.contracts.features import CategoricalOptions, Features
from components.contracts.raw_rows import ColumnNames
from components.contracts.recommender import Recommender
from components.extraction.ingest import IngestSettings, ingest
from components.runtime.errors import ContractError

SHOP = Features(
    numeric=("price",),
    categorical=("user", "item"),
    categorical_options={"item": CategoricalOptions(type="string")},
)
START = datetime(2026, 4, 1, tzinfo=timezone.utc)


def rows(n, *, first=0):
    source = random.Random(11)
    made = [
        {
            "clicked": int(source.random() < 0.3), "ts": (START + timedelta(minutes=7 * i)).isoformat(),
            "user": source.randrange(40), "item": f"i{source.randrange(9)}", "price": source.randrange(100) / 4,
        }
        for i in range(first + n)
    ]  # fmt: skip
    return made[first:]


def write(path, found):
    lines = [",".join(found[0]), *(",".join("" if v is None else str(v) for v in row.values()) for row in found)]
    path.write_text("\n".join(lines) + "\n")
    return path


def run(tmp_path, path, *, data=None, last_day=None, days=None, keep_repeated=False, lake="lake"):
    recommender = Recommender(name="shop", features=SHOP, data=data or ColumnNames(label="clicked", event_time="ts"))
    settings = IngestSettings(last_day=last_day, days=days, keep_repeated=keep_repeated)
    return ingest([path], recommender, lake=str(tmp_path / lake), replay=tmp_path / "replay", settings=settings)


def in_lake(tmp_path, lake="lake"):
    found = []
    for path in sorted((tmp_path / lake).rglob("*.parquet")):
        found += pq.read_table(path, partitioning=None).to_pylist()
    return found


def clicks(found):
    return sum(row["label"] for row in found)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


KEYED = ColumnNames(label="clicked", event_time="ts", request_id="q", row="n")


def keyed(found, *, request=lambda i: f"q{i}", number=lambda i: 0):
    return [{"q": request(i), "n": number(i), **row} for i, row in enumerate(found)]


def test_a_row_that_is_written_again_with_its_click_is_one_row_with_the_click(tmp_path):
    first = [{**row, "clicked": 0} for row in keyed(rows(400))]
    later = [{**first[i], "clicked": 1} for i in range(0, 400, 3)]
    done = run(tmp_path, write(tmp_path / "log.csv", [*first, *later]), data=KEYED)
    found = in_lake(tmp_path)
    assert (done.rows, done.replaced, done.duplicates) == (400, len(later), 0)
    assert (done.clicks, clicks(found), len(found)) == (len(later), len(later), 400)
    assert {row["request_id"] for row in found if row["label"]} == {row["q"] for row in later}


def test_counts_are_of_what_was_written_whatever_was_read(tmp_path):
    found = keyed(rows(300))
    done = run(tmp_path, write(tmp_path / "log.csv", [*found, *found[:50]]), data=KEYED)
    assert (done.rows, done.duplicates, done.replaced) == (300, 50, 0)
    assert (done.rows, done.clicks) == (len(in_lake(tmp_path)), clicks(in_lake(tmp_path)))
    assert done.lines["rows"] == 350


def test_ids_that_are_no_key_are_refused_with_the_columns_and_an_example(tmp_path):
    found = keyed(rows(400), request=lambda i: f"s{i % 16}", number=lambda i: i % 3)
    path = write(tmp_path / "log.csv", found)
    with pytest.raises(ContractError, match=r"352 of 400 rows .* the q and n of another row with other.*'s0', row 0"):
        run(tmp_path, path, data=KEYED)
    assert not in_lake(tmp_path)


def test_a_few_rows_of_one_key_are_told_and_the_last_counts(tmp_path, caplog):
    found = keyed(rows(400))
    found.append({**found[3], "price": 1000})
    done = run(tmp_path, write(tmp_path / "log.csv", found), data=KEYED)
    assert (done.rows, done.replaced) == (400, 1)
    assert "1 rows are there again with other content: the last copy of each counts" in caplog.text
    assert [row["price"] for row in in_lake(tmp_path) if row["request_id"] == "q3"] == [1000]


@pytest.mark.parametrize("data", [None, KEYED], ids=["no ids", "own ids"])
def test_a_growing_and_a_renamed_export_are_known_again(tmp_path, data):
    made = rows(400) if data is None else keyed(rows(400))
    # A renamed file takes the place of what it left itself.
    steps = [("monday.csv", made[:200]), ("tuesday.csv", made), ("copy of tuesday.csv", made)]
    done = [run(tmp_path, write(tmp_path / name, part), data=data) for name, part in steps]
    assert [(each.rows, each.already_in_lake) for each in done] == [(200, 0), (200, 200), (200, 200)]
    assert len(in_lake(tmp_path)) == 400
    assert clicks(in_lake(tmp_path)) == sum(row["clicked"] for row in made)


def test_equal_rows_of_one_file_are_events_of_their_own_and_of_another_are_the_same(tmp_path):
    made = [{**row, "ts": "2026-04-01"} for row in rows(3)] * 100
    first = run(tmp_path, write(tmp_path / "a.csv", made))
    assert (first.rows, len({row["request_id"] for row in in_lake(tmp_path)})) == (300, 300)
    again = run(tmp_path, write(tmp_path / "b.csv", made[:30]))
    assert (again.rows, again.already_in_lake) == (0, 30)


def test_a_click_that_a_later_export_adds_is_a_newer_copy_of_the_same_row(tmp_path):
    made = [{**row, "clicked": 0} for row in rows(200)]
    run(tmp_path, write(tmp_path / "monday.csv", made))
    made[7]["clicked"] = 1
    done = run(tmp_path, write(tmp_path / "tuesday.csv", made))
    assert (done.rows, done.clicks, done.already_in_lake) == (1, 1, 199)
    copies = [row for row in in_lake(tmp_path) if row["event_time"].isoformat() == made[7]["ts"]]
    assert sorted(row["label"] for row in copies) == [0, 1]
    assert len({(row["request_id"], row["row"]) for row in copies}) == 1


def test_rows_without_times_are_refused_in_a_lake_that_holds_them_unless_told(tmp_path):
    made = [{name: value for name, value in row.items() if name != "ts"} for row in rows(300)]
    names, days = ColumnNames(label="clicked"), {"last_day": START.date(), "days": 2}
    first = run(tmp_path, write(tmp_path / "a.csv", made), data=names, **days)
    again = run(tmp_path, tmp_path / "a.csv", data=names, **days)
    assert first == again  # the same file replaces itself
    write(tmp_path / "b.csv", [*made, *[{**row, "price": 7777} for row in made]])
    with pytest.raises(ContractError, match=r"300 of 600 rows are in the lake .*already.*--keep-repeated"):
        run(tmp_path, tmp_path / "b.csv", data=names, **days)
    done = run(tmp_path, tmp_path / "b.csv", data=names, keep_repeated=True, **days)
    assert (done.rows, done.already_in_lake) == (600, 0)


def test_own_request_ids_are_kept_when_times_are_given(tmp_path):
    made = [{"request_id": f"r{i // 3}", **row} for i, row in enumerate(rows(300))]
    made = [{name: value for name, value in row.items() if name != "ts"} for row in made]
    names = ColumnNames(label="clicked")
    done = run(tmp_path, write(tmp_path / "a.csv", made), data=names, last_day=START.date(), days=3)
    found = in_lake(tmp_path)
    assert (done.rows, len(found)) == (300, 300)
    assert {(row["request_id"], row["row"]) for row in found} == {(f"r{i // 3}", i % 3) for i in range(300)}
    times = {}
    for row in found:
        times.setdefault(row["request_id"], set()).add(row["event_time"])
    assert all(len(each) == 1 for each in times.values())


def test_rows_ahead_of_the_clock_are_set_aside_and_the_others_are_read(tmp_path):
    made = rows(300)
    made[120]["ts"] = "2099-05-06T00:00:00+00:00"
    done = run(tmp_path, write(tmp_path / "log.csv", made))
    assert (done.rows, done.malformed, done.ahead) == (299, 1, 1)
    (kept,) = map(json.loads, (tmp_path / "replay.malformed_rows.jsonl").read_text().splitlines())
    assert kept["line"] == 122
    assert kept["reason"].startswith("ts is 2099-05-06 00:00:00.000000Z, ahead of the clock, expected no time after 20")
    assert max(path.name for path in (tmp_path / "lake").iterdir()) < "day=2026-05"


def test_a_log_of_eight_hundred_days_is_read(tmp_path):
    made = [{**row, "ts": (START - timedelta(days=i)).isoformat()} for i, row in enumerate(rows(800))]
    done = run(tmp_path, write(tmp_path / "log.csv", made))
    assert (done.rows, len(list((tmp_path / "lake").glob("day=*")))) == (800, 800)


def test_the_bytes_of_the_lake_do_not_depend_on_the_order_of_the_rows(tmp_path):
    made = keyed(rows(500))
    held = []
    for lake, found in (("one", made), ("other", random.Random(1).sample(made, len(made)))):
        run(tmp_path, write(tmp_path / "log.csv", found), data=KEYED, lake=lake)
        held.append([path.read_bytes() for path in sorted((tmp_path / lake).rglob("*.parquet"))])
    assert held[0] == held[1]


def test_another_file_of_the_same_name_and_size_takes_no_rows_place(tmp_path):
    made = [{**row, "price": "1.5", "user": 10 + row["user"] % 10} for row in rows(200)]
    sizes = set()
    for part in (made[:100], made[100:]):
        run(tmp_path, write(tmp_path / "clicks.csv", part))
        sizes.add((tmp_path / "clicks.csv").stat().st_size)
    assert len(sizes) == 1
    assert len(in_lake(tmp_path)) == 200
