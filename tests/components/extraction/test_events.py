"""Tests of event identity: rewritten rows, repeated files, ambiguous ids and fast clocks."""

import json
import random
from datetime import datetime, timedelta, timezone

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cli.backfill import backfill
from cli.ingest import IngestSettings, ingest
from evergreen.config.data import ColumnNames
from evergreen.config.features import CategoricalOptions, Features
from evergreen.config.spec import Recommender
from evergreen.runtime.errors import ContractError
from tests.support.errors import raises

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
            "clicked": int(source.random() < 0.3),
            "ts": (START + timedelta(minutes=7 * i)).isoformat(),
            "user": source.randrange(40),
            "item": f"i{source.randrange(9)}",
            "price": source.randrange(100) / 4,
        }
        for i in range(first + n)
    ]
    return made[first:]


def write(path, found):
    lines = [
        ",".join(found[0]),
        *(",".join("" if v is None else str(v) for v in row.values()) for row in found),
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def run(tmp_path, path, *, data=None, last_day=None, days=None, keep_repeated=False, lake="lake"):
    recommender = Recommender(
        name="shop", features=SHOP, data=data or ColumnNames(label="clicked", event_time="ts")
    )
    settings = IngestSettings(last_day=last_day, days=days, keep_repeated=keep_repeated)
    return ingest(
        [path],
        recommender,
        lake=str(tmp_path / lake),
        replay=tmp_path / "replay",
        settings=settings,
    )


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


def test_row_that_is_written_again_with_its_click_is_one_row_with_click(tmp_path):
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


def test_ids_that_are_no_key_are_refused_with_columns_and_example(tmp_path):
    found = keyed(rows(400), request=lambda i: f"s{i % 16}", number=lambda i: i % 3)
    path = write(tmp_path / "log.csv", found)
    with raises(ContractError, "352 of 400 rows", "q and n", "'s0', row 0"):
        run(tmp_path, path, data=KEYED)
    assert not in_lake(tmp_path)


def test_few_rows_of_one_key_are_told_and_last_counts(tmp_path, caplog):
    found = keyed(rows(400))
    found.append({**found[3], "price": 1000})
    done = run(tmp_path, write(tmp_path / "log.csv", found), data=KEYED)
    assert (done.rows, done.replaced) == (400, 1)
    assert "1 rows occur again with other content: the last copy of each counts" in caplog.text
    assert [row["price"] for row in in_lake(tmp_path) if row["request_id"] == "q3"] == [1000]


@pytest.mark.parametrize("data", [None, KEYED], ids=["no ids", "own ids"])
def test_growing_and_renamed_export_are_known_again(tmp_path, data):
    made = rows(400) if data is None else keyed(rows(400))
    # If a file was renamed, its rows replace the rows that were imported under the old name.
    steps = [("monday.csv", made[:200]), ("tuesday.csv", made), ("copy of tuesday.csv", made)]
    done = [run(tmp_path, write(tmp_path / name, part), data=data) for name, part in steps]
    assert [(each.rows, each.already_in_lake) for each in done] == [
        (200, 0),
        (200, 200),
        (200, 200),
    ]
    assert len(in_lake(tmp_path)) == 400
    assert clicks(in_lake(tmp_path)) == sum(row["clicked"] for row in made)


def test_equal_rows_are_two_events_in_one_file_and_one_across_files(tmp_path):
    made = [{**row, "ts": "2026-04-01"} for row in rows(3)] * 100
    first = run(tmp_path, write(tmp_path / "a.csv", made))
    assert (first.rows, len({row["request_id"] for row in in_lake(tmp_path)})) == (300, 300)
    again = run(tmp_path, write(tmp_path / "b.csv", made[:30]))
    assert (again.rows, again.already_in_lake) == (0, 30)


def test_click_that_later_export_adds_is_newer_copy_of_same_row(tmp_path):
    made = [{**row, "clicked": 0} for row in rows(200)]
    run(tmp_path, write(tmp_path / "monday.csv", made))
    made[7]["clicked"] = 1
    done = run(tmp_path, write(tmp_path / "tuesday.csv", made))
    assert (done.rows, done.clicks, done.already_in_lake) == (1, 1, 199)
    copies = [row for row in in_lake(tmp_path) if row["event_time"].isoformat() == made[7]["ts"]]
    assert sorted(row["label"] for row in copies) == [0, 1]
    assert len({(row["request_id"], row["row"]) for row in copies}) == 1


def test_rows_without_times_are_refused_in_lake_with_times_unless_allowed(tmp_path):
    made = [{name: value for name, value in row.items() if name != "ts"} for row in rows(300)]
    names, days = ColumnNames(label="clicked"), {"last_day": START.date(), "days": 2}
    first = run(tmp_path, write(tmp_path / "a.csv", made), data=names, **days)
    again = run(tmp_path, tmp_path / "a.csv", data=names, **days)
    assert first == again  # repeating the import replaces the file's own rows
    write(tmp_path / "b.csv", [*made, *[{**row, "price": 7777} for row in made]])
    with raises(ContractError, "300 of 600 rows", "equal rows of other files", "--keep-repeated"):
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
    assert {(row["request_id"], row["row"]) for row in found} == {
        (f"r{i // 3}", i % 3) for i in range(300)
    }
    times = {}
    for row in found:
        times.setdefault(row["request_id"], set()).add(row["event_time"])
    assert all(len(each) == 1 for each in times.values())


def test_rows_ahead_of_clock_are_set_aside_and_others_are_read(tmp_path):
    made = rows(300)
    made[120]["ts"] = "2099-05-06T00:00:00+00:00"
    done = run(tmp_path, write(tmp_path / "log.csv", made))
    assert (done.rows, done.malformed, done.ahead) == (299, 1, 1)
    (kept,) = map(json.loads, (tmp_path / "replay.malformed_rows.jsonl").read_text().splitlines())
    assert kept["line"] == 122
    assert kept["reason"].startswith(
        "ts is 2099-05-06 00:00:00.000000Z, in the future, expected no time after 20"
    )
    assert max(path.name for path in (tmp_path / "lake").iterdir()) < "day=2026-05"


def test_log_of_eight_hundred_days_is_read(tmp_path):
    made = [
        {**row, "ts": (START - timedelta(days=i)).isoformat()} for i, row in enumerate(rows(800))
    ]
    done = run(tmp_path, write(tmp_path / "log.csv", made))
    assert (done.rows, len(list((tmp_path / "lake").glob("day=*")))) == (800, 800)


def test_bytes_of_lake_do_not_depend_on_order_of_rows(tmp_path):
    made = keyed(rows(500))
    held = []
    for lake, found in (("one", made), ("other", random.Random(1).sample(made, len(made)))):
        run(tmp_path, write(tmp_path / "log.csv", found), data=KEYED, lake=lake)
        held.append([path.read_bytes() for path in sorted((tmp_path / lake).rglob("*.parquet"))])
    assert held[0] == held[1]


def test_another_file_of_same_name_and_size_takes_no_rows_place(tmp_path):
    made = [{**row, "price": "1.5", "user": 10 + row["user"] % 10} for row in rows(200)]
    sizes = set()
    for part in (made[:100], made[100:]):
        run(tmp_path, write(tmp_path / "clicks.csv", part))
        sizes.add((tmp_path / "clicks.csv").stat().st_size)
    assert len(sizes) == 1
    assert len(in_lake(tmp_path)) == 200


ODD = Features(
    numeric=("Score", "_time", "Position"),
    categorical=(
        "a",
        "A",
        "Label",
        "row_position",
        "time",
        "day",
        "_position",
        "request",
        "spread_time",
    ),
    lists=("tags", "Tags"),
)


@pytest.mark.parametrize("form", ["csv", "parquet", "jsonl"])
@pytest.mark.parametrize("folder", ["plain", "a=99", "x[1]*"])
def test_columns_of_any_name_in_any_folder_keep_their_own_values(tmp_path, form, folder):
    recommender = Recommender(name="odd", features=ODD, data=ColumnNames(label="clicked"))
    made = [
        {name: 10 * j + i for j, name in enumerate((*ODD.numeric, *ODD.categorical))}
        | {
            "tags": [i],
            "Tags": [i + 1],
            "clicked": i % 2,
            "event_time": (START + timedelta(hours=i)).isoformat(),
        }
        for i in range(40)
    ]
    (tmp_path / folder).mkdir()
    path = tmp_path / folder / f"rows.{form}"
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(made), path)
    elif form == "jsonl":
        path.write_text("\n".join(map(json.dumps, made)))
    else:
        write(path, made)
    replay = tmp_path / folder / "replay.parquet"
    settings = IngestSettings(lake_fraction=0.5)
    ingest([path], recommender, lake=str(tmp_path / "lake"), replay=replay, settings=settings)
    found = [*in_lake(tmp_path), *pq.read_table(replay, partitioning=None).to_pylist()]
    names = [*ODD.numeric, *ODD.categorical, *ODD.lists]
    assert [{name: row[name] for name in names} for row in found] == [
        {n: row[n] for n in names} for row in made
    ]
    assert [row["label"] for row in found] == [row["clicked"] for row in made]
    assert {(row["score"], row["position"]) for row in found} == {(None, None)}
    grown = path.with_name(f"grown.{form}")
    grown.write_bytes(path.read_bytes()) if form == "parquet" else grown.write_text(
        path.read_text() + "\n"
    )
    again = ingest(
        [grown], recommender, lake=str(tmp_path / "lake"), replay=replay, settings=IngestSettings()
    )
    assert again.already_in_lake == (
        0 if form == "parquet" else 20
    )  # Equal bytes mean the same file.


def test_equal_rows_of_other_labels_are_same_in_another_order(tmp_path):
    made = [
        {**row, "ts": "2026-04-01", "user": 1, "item": "i", "price": 2, "clicked": int(i < 3)}
        for i, row in enumerate(rows(10))
    ]
    run(tmp_path, write(tmp_path / "a.csv", made))
    done = run(tmp_path, write(tmp_path / "b.csv", [*made[::-1], *rows(1)]))
    assert (done.rows, done.already_in_lake, done.repeated) == (1, 10, 0)
    assert clicks(in_lake(tmp_path)) == 3 + rows(1)[0]["clicked"]


def test_rows_written_again_with_their_click_and_no_key_are_told(tmp_path, caplog):
    made = [{**row, "clicked": 0} for row in rows(300)]
    done = run(
        tmp_path, write(tmp_path / "a.csv", [*made, *[{**row, "clicked": 1} for row in made[:48]]])
    )
    assert (done.rows, done.repeated) == (348, 48)
    assert "48 rows equal an earlier row in everything but the label" in caplog.text


def test_another_order_of_features_leaves_rows_known(tmp_path):
    path = write(tmp_path / "a.csv", rows(50))
    run(tmp_path, path)
    other = Features(
        numeric=("price",),
        categorical=("item", "user"),
        categorical_options=dict(SHOP.categorical_options),
    )
    recommender = Recommender(
        name="shop", features=other, data=ColumnNames(label="clicked", event_time="ts")
    )
    write(tmp_path / "b.csv", rows(60))
    done = ingest(
        [tmp_path / "b.csv"],
        recommender,
        lake=str(tmp_path / "lake"),
        replay=tmp_path / "replay",
        settings=IngestSettings(),
    )
    assert (done.rows, done.already_in_lake) == (10, 50)


def test_rows_that_are_kept_though_repeated_have_ids_of_their_own(tmp_path):
    made = rows(50)
    run(tmp_path, write(tmp_path / "a.csv", made))
    run(tmp_path, write(tmp_path / "b.csv", rows(60)), keep_repeated=True)
    found = in_lake(tmp_path)
    assert (len(found), len({(row["request_id"], row["row"]) for row in found})) == (110, 110)


def test_values_with_control_characters_are_other_values(tmp_path):
    words = Features(
        numeric=(),
        categorical=("u", "v"),
        categorical_options=dict.fromkeys("uv", CategoricalOptions(type="string")),
    )
    recommender = Recommender(
        name="w", features=words, data=ColumnNames(label="clicked", event_time="ts")
    )
    held, settings = {"clicked": 1, "ts": "2026-04-01"}, IngestSettings()
    pairs = [("a\x1fb", "c"), ("a", "b\x1fc"), ("v=", "x"), ("v", "=x")]
    for i, (u, v) in enumerate(pairs):
        path = write(tmp_path / f"{i}.csv", [{**held, "u": u, "v": v}])
        done = ingest(
            [path],
            recommender,
            lake=str(tmp_path / "lake"),
            replay=tmp_path / "r",
            settings=settings,
        )
        assert (done.rows, done.already_in_lake) == (1, 0)


def test_requests_without_numbers_in_another_order_are_refused_not_mixed(tmp_path):
    names = ColumnNames(label="clicked", event_time="ts", request_id="q")
    made = [{"q": f"q{i // 3}", **row} for i, row in enumerate(rows(300))]
    made = [{**row, "ts": made[i // 3 * 3]["ts"]} for i, row in enumerate(made)]
    run(tmp_path, write(tmp_path / "a.csv", made), data=names)
    other = [row for at in range(0, 300, 3) for row in made[at : at + 3][::-1]]
    with pytest.raises(
        ContractError,
        match=r"2\d\d of \d+ rows have the same request and row number as a row .*data.row",
    ):
        run(tmp_path, write(tmp_path / "b.csv", other), data=names)
    assert len(in_lake(tmp_path)) == 300


def test_rows_without_request_id_among_others_are_requests_of_their_own(tmp_path):
    made = keyed(rows(300))
    for row in made[::7]:
        row["q"] = ""
    done = run(tmp_path, write(tmp_path / "a.csv", made), data=KEYED)
    found = in_lake(tmp_path)
    assert (done.rows, done.malformed, len({row["request_id"] for row in found})) == (300, 0, 300)


def test_what_back_fill_replaced_is_not_in_lake(tmp_path):
    made = [{**row, "ts": f"2026-04-01T00:{i:02d}:00"} for i, row in enumerate(rows(40))]
    run(tmp_path, write(tmp_path / "a.csv", made))
    recommender = Recommender(name="shop", features=SHOP)
    (part,) = (tmp_path / "lake").rglob("*.parquet")
    pq.write_table(
        pq.read_table(part, partitioning=None).slice(0, 30), tmp_path / "corrected.parquet"
    )
    backfill(
        [tmp_path / "corrected.parquet"], recommender, lake=str(tmp_path / "lake"), day=START.date()
    )
    done = run(tmp_path, write(tmp_path / "b.csv", [*made, *rows(41)[40:]]))
    assert (done.rows, done.already_in_lake) == (11, 30)
