"""Tests of extraction and ingestion with other columns than Criteo's."""

import csv
import hashlib
import json
import random
from dataclasses import replace
from datetime import date, datetime, timedelta, timezone

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.csv import write_csv

from cli.backfill import backfill
from cli.ingest import IngestSettings, ingest, main
from components.extraction.extract import extract
from components.extraction.lake import Lake
from components.extraction.lake_files import LakeFiles
from evergreen.config.data import WEIGHT, ColumnNames
from evergreen.config.features import CategoricalOptions, Features, ListOptions
from evergreen.config.spec import Recommender
from evergreen.contracts import criteo, raw_rows
from evergreen.contracts.category_texts import read_texts
from evergreen.contracts.raw_rows import category_matrix
from evergreen.rows.forms import find_reader
from evergreen.rows.parquet import RawParquet
from evergreen.rows.raw_schema import MalformedRows, excluded_columns, raw_schema
from evergreen.rows.times import TimeSpan, to_micros
from evergreen.runtime.errors import ContractError
from evergreen.storage.folder import FolderObjects
from evergreen.storage.uris import local_path
from inference_client.rows import feature_rows
from testing.recommenders import accept_into
from tests.support.archives import day_folders
from tests.support.errors import raises, raises_text
from tests.support.lakes import rows_in

SHOP = Features(numeric=("price", "age of item"), categorical=("item", "shop", "city"))
NUMBERS = Features(numeric=("price",), categorical=())
CATEGORIES = Features(numeric=(), categorical=("item",))
EDGES = pytest.mark.parametrize("features", [NUMBERS, CATEGORIES], ids=["numbers", "categories"])
"""Recommenders without numeric features or without categorical features. All other tests use a
recommender with every kind of feature."""
OWN_NAMES = ColumnNames(label="clicked", request_id="impression", row="slot", event_time="ts")
DAY = datetime(2026, 5, 1, tzinfo=timezone.utc)


def recommender(features=SHOP, **more):
    return Recommender(name="shop", features=features, **more)


def shop_rows(n: int, *, features=SHOP, seed: int = 0, hours: float = 60.0) -> list[dict]:
    """Return rows in time order, in which the columns have the names of the raw schema.

    Each request has three rows, and some values are missing.
    """
    source = random.Random(seed)
    rows = []
    for i in range(n):
        numbers = {
            name: None if source.random() < 0.1 else source.randint(-4, 90) / 4
            for name in features.numeric
        }
        items = {
            name: None if source.random() < 0.1 else source.randrange(2**32)
            for name in features.categorical
        }
        rows.append(
            {
                raw_rows.LABEL: int(source.random() < 0.3),
                **numbers,
                **items,
                raw_rows.REQUEST_ID: f"request {seed}/{i // 3}",
                raw_rows.ROW: i % 3,
                raw_rows.EVENT_TIME: DAY + timedelta(hours=hours) * (i // 3) / n * 3,
            }
        )
    return rows


def write_lake(root, rows, features) -> None:
    for table, folder in day_folders(root, pa.Table.from_pylist(rows, raw_schema(features))):
        pq.write_table(table, folder / "part.parquet")


def extracted(lake, features, folder, **settings):
    opened = Lake(files=LakeFiles(FolderObjects(lake)))
    described = recommender(features, settings={"extraction": settings} if settings else {})
    return extract(opened, TimeSpan(), folder=folder, recommender=described)


def known(rows):
    """Return the rows without the columns about the serving version."""
    return [
        {name: value for name, value in row.items() if name not in raw_rows.SERVED_BY}
        for row in rows
    ]


@EDGES
def test_lake_of_any_features_is_extracted_with_description_in_manifest(tmp_path, features):
    rows = shop_rows(600, features=features)
    write_lake(tmp_path / "lake", rows, features)
    dataset = extracted(tmp_path / "lake", features, tmp_path / "out")
    assert dataset.recommender == recommender(features)
    assert known(rows_in(dataset.train_uri, dataset.holdout_uri)) == rows
    dataset.write(tmp_path / "raw.json")
    assert type(dataset).read(tmp_path / "raw.json").recommender == recommender(features)


def test_columns_are_chosen_by_recommenders_names():
    assert excluded_columns(["city", "price"], SHOP) == ["age of item", "item", "shop"]
    with raises_text(
        ContractError,
        "unknown-column",
        names=["I1"],
        columns="price, age of item, item, shop, city",
    ):
        excluded_columns(["price", "I1"], SHOP)


# -- rows in a user's own format


def own_text(rows, names=OWN_NAMES, *, delimiter=",", time=str, leave_out=()) -> str:
    """Format the rows as text with a header and the user's column names.

    The columns have another order, and one column is not used by any feature.
    """
    raws = {
        names.event_time: raw_rows.EVENT_TIME,
        names.row: raw_rows.ROW,
        names.request_id: raw_rows.REQUEST_ID,
    }
    columns = {
        "remark": None,
        **raws,
        **{name: name for name in reversed(SHOP.names)},
        names.label: raw_rows.LABEL,
    }
    columns = {name: raw for name, raw in columns.items() if name not in leave_out}
    lines = [delimiter.join(columns)]
    for row in rows:
        values = {name: row.get(raw) for name, raw in columns.items()}
        if "remark" in columns:
            values["remark"] = f'"so{delimiter}so"'
        if names.event_time in columns:
            values[names.event_time] = time(row[raw_rows.EVENT_TIME])
        lines.append(
            delimiter.join("" if value is None else str(value) for value in values.values())
        )
    return "\n".join(lines) + "\n"


def ingested(tmp_path, path, features=SHOP, *, names=OWN_NAMES, lake_fraction=1.0, **settings):
    """Write the file's rows to a lake and a replay file.

    Return the counts and the rows of both files.
    """
    counts = ingest(
        [path] if path.is_file() else sorted(path.iterdir()),
        recommender(features, data=names),
        lake=str(tmp_path / "a lake"),
        replay=tmp_path / "replay.parquet",
        settings=IngestSettings(lake_fraction=lake_fraction, **settings),
    )
    days = sorted((tmp_path / "a lake").iterdir())
    in_lake = [row for day in days if day.name[0] != "." for row in rows_in(day.as_uri())]
    return counts, in_lake, pq.read_table(tmp_path / "replay.parquet").to_pylist()


@pytest.mark.parametrize("delimiter", [",", "\t", ";"])
@pytest.mark.parametrize(
    "time",
    [
        str,
        datetime.isoformat,
        lambda t: t.replace(tzinfo=None).isoformat(" "),
        lambda t: repr(t.timestamp()),
    ],
    ids=["zone", "T", "no zone", "seconds"],
)
def test_text_with_header_becomes_lake_in_order_of_time(tmp_path, delimiter, time):
    rows = shop_rows(400)
    shuffled = random.Random(1).sample(rows, len(rows))
    (tmp_path / "clicks.csv").write_text(own_text(shuffled, delimiter=delimiter, time=time))
    counts, in_lake, replay = ingested(tmp_path, tmp_path / "clicks.csv", lake_fraction=0.75)
    assert (counts.rows, counts.lake_rows, counts.replay_rows, counts.malformed) == (
        400,
        300,
        100,
        0,
    )
    assert counts.clicks == sum(row[raw_rows.LABEL] for row in rows)
    assert known(in_lake + replay) == sorted(
        rows, key=lambda row: (row["event_time"], row["request_id"], row["row"])
    )
    assert {path.name for path in (tmp_path / "a lake").glob("day=*")} == {
        "day=2026-05-01",
        "day=2026-05-02",
    }
    extracted(tmp_path / "a lake", SHOP, tmp_path / "out")


PARQUET_TIMES = {
    "timestamps": pa.timestamp("us", tz="UTC"),
    "nanoseconds": pa.timestamp("ns"),
    "another zone": pa.timestamp("ms", tz="Europe/Berlin"),
    "seconds": pa.int64(),
    "fractions": pa.float64(),
}


def test_by_default_all_rows_are_in_lake_and_no_other_file_is_written(tmp_path, monkeypatch):
    accept_into(tmp_path / "store", recommender(data=OWN_NAMES))
    (tmp_path / "clicks.csv").write_text(own_text(shop_rows(50)))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    paths = {"store": "store", "data": "clicks.csv", "lake": "lake"}
    flags = [f"--{flag}={tmp_path / name}" for flag, name in paths.items()]
    assert main(flags) == 0
    assert (
        sum(pq.read_table(path).num_rows for path in (tmp_path / "lake").rglob("*.parquet")) == 50
    )
    assert list((tmp_path / "here").iterdir()) == []
    assert main([*flags, "--lake-fraction", "0.5"]) == 2


@pytest.mark.parametrize("kind", PARQUET_TIMES.values(), ids=PARQUET_TIMES.keys())
def test_parquet_file_under_other_names_becomes_lake(tmp_path, kind):
    rows = [
        {**row, "event_time": row["event_time"].replace(microsecond=0)} for row in shop_rows(300)
    ]
    table = pa.Table.from_pylist(rows, raw_schema(SHOP)).drop(list(raw_rows.SERVED_BY))
    times = [row["event_time"].timestamp() for row in rows]
    stamps = (
        pa.array(times, kind) if not pa.types.is_timestamp(kind) else table["event_time"].cast(kind)
    )
    columns = {
        "clicked": pa.array([bool(row["label"]) for row in rows]),
        "impression": table["request_id"].combine_chunks().dictionary_encode(),
        "slot": table["row"].cast(pa.int8()),
        "ts": stamps,
        "price": table["price"].cast(pa.float64()),
        "age of item": table["age of item"],
        "item": table["item"].cast(pa.uint32()),
        "shop": table["shop"],
        "city": table["city"].cast(pa.float64()),
    }
    pq.write_table(pa.table(columns), tmp_path / "clicks.parquet")
    _, in_lake, _ = ingested(tmp_path, tmp_path / "clicks.parquet")
    assert known(in_lake) == rows


@EDGES
def test_rows_without_times_are_spread_over_days_that_are_asked_for(tmp_path, features):
    rows = shop_rows(200, features=features)
    table = pa.Table.from_pylist(rows, raw_schema(features)).select(
        [raw_rows.LABEL, *features.names]
    )
    pq.write_table(table, tmp_path / "clicks.parquet")
    days = {"last_day": date(2026, 3, 4), "days": 2}
    _, in_lake, _ = ingested(
        tmp_path, tmp_path / "clicks.parquet", features, names=ColumnNames(), **days
    )
    assert [
        {name: row[name] for name in table.column_names} for row in in_lake
    ] == table.to_pylist()
    assert {row["event_time"].date() for row in in_lake} == {date(2026, 3, 3), date(2026, 3, 4)}


def test_without_request_each_row_is_one_and_missing_positions_are_set(tmp_path):
    rows = shop_rows(300, hours=5)
    names = ColumnNames(label="clicked", event_time="ts")
    (tmp_path / "no request.csv").write_text(own_text(rows, names, leave_out=("request_id", "row")))
    _, in_lake, _ = ingested(tmp_path, tmp_path / "no request.csv", names=names)
    assert len({row["request_id"] for row in in_lake}) == 300
    assert {row["row"] for row in in_lake} == {0}
    (tmp_path / "two").mkdir()
    for number, part in enumerate((rows[:100], rows[100:])):  # the split falls within a request
        text = own_text(part, replace(names, request_id="impression"), leave_out=("row",))
        (tmp_path / "two" / f"{number}.csv").write_text(text)
    (tmp_path / "again").mkdir()
    _, in_lake, _ = ingested(
        tmp_path / "again", tmp_path / "two", names=replace(names, request_id="impression")
    )
    assert known(in_lake) == rows


def test_row_that_is_there_twice_is_ingested_once(tmp_path):
    rows = shop_rows(90, hours=5)
    (tmp_path / "clicks.csv").write_text(own_text([*rows, rows[4]]))
    counts, in_lake, _ = ingested(tmp_path, tmp_path / "clicks.csv")
    assert (counts.rows, counts.duplicates) == (90, 1)
    assert known(in_lake) == rows


BAD = {
    "label": ("clicked", "maybe", "clicked is 'maybe', expected 0, 1, true or false"),
    "number": ("price", "cheap", "price is 'cheap', expected a finite number"),
    "infinity": ("price", "1e300", "price is '1e300', expected a finite number"),
    "word": ("city", "Rome", "city is 'Rome', expected a whole number of 64 bits"),
    "too large": ("city", str(2**64), f"city is '{2**64}', expected a whole number of 64 bits"),
    "zeros before": (
        "city",
        "007",
        "city is '007', expected a whole number of 64 bits, exact and without",
    ),
    "rounded": (
        "city",
        f"{2**53 + 2}.0",
        f"city is '{2**53 + 2}.0', expected a whole number of 64 bits",
    ),
    "no day": ("ts", "2026-02-30", "ts is '2026-02-30', expected an ISO 8601 time"),
    "milliseconds": ("ts", "1777593600000", "ts is '1777593600000', expected an ISO 8601 time"),
    "ahead": (
        "ts",
        "2999-01-01",
        "ts is 2999-01-01 00:00:00.000000Z, in the future, expected no time after",
    ),
    "no time": (
        "ts",
        "1899-12-30",
        "ts is 1899-12-30 00:00:00.000000Z, expected no time before 1990-01-01",
    ),
    "long request": (
        "impression",
        "q" * 129,
        f"impression is '{'q' * 129}', expected a text of up to 128",
    ),
    "ragged": ("price", "1,2", "9 columns, expected 8"),
    "quote": ("impression", '"op,en', "a quote is not closed"),
}


@pytest.mark.parametrize(("column", "text", "reason"), BAD.values(), ids=BAD.keys())
def test_only_malformed_line_is_stored_with_its_number_and_reason(tmp_path, column, text, reason):
    rows = shop_rows(200)
    lines = own_text(rows, leave_out=("remark", "slot")).splitlines()
    fields = lines[7].split(",")
    fields[lines[0].split(",").index(column)] = text
    lines[7] = ",".join(fields)
    (tmp_path / "clicks.csv").write_text("\n".join(lines))
    counts, in_lake, _ = ingested(
        tmp_path, tmp_path / "clicks.csv", names=replace(OWN_NAMES, row="row")
    )
    (rejected,) = map(
        json.loads, (tmp_path / "replay.parquet.malformed_rows.jsonl").read_text().splitlines()
    )
    assert (rejected["line"], rejected["text"]) == (8, lines[7])
    assert rejected["reason"].startswith(reason)
    assert (counts.malformed, len(in_lake)) == (1, 199)
    assert (counts.lines["rows"], counts.lines["rejected"], counts.lines["header"]) == (199, 1, 1)


def weights_of(rows, name="counts"):
    return sorted((row[raw_rows.REQUEST_ID], row[raw_rows.ROW], row[name]) for row in rows)


@pytest.mark.parametrize("form", ["csv", "parquet"])
@pytest.mark.parametrize("wrong", [None, -0.5, float("inf"), 1e39])
def test_weights_come_from_files_and_wrong_one_makes_its_row_malformed(tmp_path, form, wrong):
    names, rows = replace(OWN_NAMES, label="label", row="row", weight="counts"), shop_rows(200)
    rows = [{**row, "counts": i % 4 / 2} for i, row in enumerate(rows)]
    own = [
        {**row, "impression": row[raw_rows.REQUEST_ID], "ts": row[raw_rows.EVENT_TIME]}
        for row in rows
    ]
    own[7]["counts"] = wrong
    path = tmp_path / f"clicks.{form}"
    (pq.write_table if form == "parquet" else write_csv)(pa.Table.from_pylist(own), path)
    _, in_lake, _ = ingested(tmp_path, path, names=names)
    assert weights_of(in_lake, WEIGHT) == weights_of(rows[:7] + rows[8:])
    (rejected,) = map(
        json.loads, (tmp_path / "replay.parquet.malformed_rows.jsonl").read_text().splitlines()
    )
    assert rejected["line"] == (8 if form == "parquet" else 9)
    assert rejected["reason"].startswith("counts is ")
    assert rejected["reason"].endswith(" expected a finite number of at least 0")
    with raises(ContractError, "lacks", ["weigth"], "shop"):
        ingested(tmp_path, path, names=replace(names, weight="weigth"))


def test_rows_without_weight_column_count_one_and_without_key_have_none(tmp_path):
    rows = shop_rows(120, hours=5)
    write_lake(tmp_path / "lake", rows[:60], SHOP)
    weighted = [{**row, WEIGHT: 10.0} for row in rows[60:]]
    (day,) = (tmp_path / "lake").iterdir()
    pq.write_table(
        pa.Table.from_pylist(weighted, raw_schema(SHOP, weighted=True)), day / "weighted.parquet"
    )
    opened = Lake(files=LakeFiles(FolderObjects(tmp_path / "lake")))
    described = recommender(data=ColumnNames(weight="counts"))
    dataset = extract(opened, TimeSpan(), folder=tmp_path / "out", recommender=described)
    found = rows_in(dataset.train_uri, dataset.holdout_uri)
    assert [row[WEIGHT] for row in found] == [1.0] * 60 + [10.0] * 60
    assert dataset.schema_mismatches == []
    without = extracted(tmp_path / "lake", SHOP, tmp_path / "without")
    assert WEIGHT not in rows_in(without.train_uri)[0]
    assert [each["column"] for each in without.schema_mismatches] == [WEIGHT]


def parquet_of(tmp_path, **columns):
    table = pa.Table.from_pylist(shop_rows(30), raw_schema(SHOP))
    for name, column in columns.items():
        table = table.set_column(table.schema.get_field_index(name), name, column)
    pq.write_table(table, tmp_path / "clicks.parquet")
    return tmp_path / "clicks.parquet"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"item": ["a"] * 30},
            "30 of 30 rows are malformed .*item is 'a', expected a whole number",
        ),
        (
            {"item": [0.5] * 30},
            "30 of 30 rows are malformed .*item is 0.5, expected a whole number",
        ),
        (
            {"item": [2.0**60] * 30},
            "30 of 30 rows are malformed .*item is 1.15.*, expected a whole number",
        ),
        ({"item": [[1]] * 30}, "item is .1., expected a whole number"),
        (
            {"event_time": [True] * 30},
            "event_time is True, which is not a time between 1990 and tomorrow",
        ),
        (
            {"event_time": [7] * 30},
            "event_time is 7, which is not a time .* since 1970: 1970-01-01 to 1970-",
        ),
    ],
)
def test_column_of_type_that_cannot_be_is_refused_by_name(tmp_path, columns, message):
    path = parquet_of(tmp_path, **{name: pa.array(values) for name, values in columns.items()})
    names = (
        ColumnNames(label="label", row="row")
        if "event_time" in columns
        else ColumnNames(row="position")
    )
    with pytest.raises(ContractError, match=message):
        ingested(tmp_path, path, names=names)


def test_missing_columns_duplicate_columns_and_absent_times_are_reported(tmp_path):
    text = own_text(shop_rows(5))
    (tmp_path / "lacks.csv").write_text(text.replace("shop", "store", 1))
    with raises(ContractError, "lacks.csv", "lacks", ["shop"], "has ['remark'"):
        ingested(tmp_path, tmp_path / "lacks.csv")
    (tmp_path / "twice.csv").write_text(text.replace("remark", "shop", 1))
    with raises_text(ContractError, "columns-twice", file=tmp_path / "twice.csv", columns=["shop"]):
        ingested(tmp_path, tmp_path / "twice.csv")
    (tmp_path / "label.csv").write_text(text.replace("clicked", "bought", 1))
    with raises(ContractError, "label.csv", "expected also 'clicked'", "shop"):
        ingested(tmp_path, tmp_path / "label.csv")
    names = replace(OWN_NAMES, event_time="event_time")
    (tmp_path / "times.csv").write_text(own_text(shop_rows(5), names, leave_out=("event_time",)))
    with raises_text(ContractError, "no-times", file=tmp_path / "times.csv", day="2026-03-07"):
        ingested(tmp_path, tmp_path / "times.csv", names=names)
    with raises_text(ContractError, "one-of-both-days"):
        ingested(tmp_path, tmp_path / "times.csv", days=3)


def test_criteo_text_is_refused_for_other_columns_or_weights_by_name(
    tmp_path, criteo_rows, write_text
):
    path = write_text(tmp_path / "day_0", criteo_rows(5))
    for other in (
        recommender(),
        replace(criteo.CRITEO_RECOMMENDER, data=ColumnNames(weight="counts")),
    ):
        with raises(ContractError, f"expected also '{other.data.label}'"):
            find_reader(path, other)
    header = ",".join(["Label", *criteo.FEATURES])
    path = write_text(tmp_path / "kaggle.csv", criteo_rows(5), delimiter=",", header=header)
    with raises(ContractError, "lacks", "['price'", "has ['Label', 'I1'"):
        find_reader(path, recommender(data=ColumnNames(label="Label")))


def test_day_is_back_filled_by_files_of_lake_of_same_recommender(tmp_path):
    rows = shop_rows(90, hours=5)
    write_lake(tmp_path / "lake", rows, SHOP)
    corrected = [{**row, "label": 1} for row in rows]
    pq.write_table(pa.Table.from_pylist(corrected, raw_schema(SHOP)), tmp_path / "new.parquet")
    backfill([tmp_path / "new.parquet"], recommender(), lake=str(tmp_path / "lake"), day=DAY.date())
    dataset = extracted(tmp_path / "lake", SHOP, tmp_path / "out")
    assert known(rows_in(dataset.train_uri, dataset.holdout_uri)) == corrected
    (tmp_path / "own.csv").write_text(own_text(rows))
    with raises(ContractError, "own.csv", "event times", "raw schema"):
        backfill(
            [tmp_path / "own.csv"],
            recommender(data=OWN_NAMES),
            lake=str(tmp_path / "lake"),
            day=DAY.date(),
        )


STRING_FEATURES = Features(
    numeric=("price",),
    categorical=("item", "user"),
    categorical_options={"item": CategoricalOptions(type="string")},
)
ITEMS = ["red shoe", "7", "07", "Ünïcode", None, "-5", "true", ""]
USERS = [0, 2**52 - 1, 2**52, 2**63 - 1, -(2**63), -1, None, 7]


def hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") // 2**12


def expected_categories() -> list[tuple]:
    numbers = {"7": 7, "true": 1}  # other programs write a boolean as a number
    items = [None if not each else numbers.get(each, hashed(each)) for each in ITEMS]
    return [
        (item, user if user is None or 0 <= user < 2**52 else hashed(str(user)))
        for item, user in zip(items, USERS)
    ]


def write_rows(path, rows) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows({**row, "event_time": row["event_time"].isoformat()} for row in rows)


@pytest.mark.parametrize(
    "form", ["lake of words", "lake of categories", "lake of bytes", "parquet", "bytes", "csv"]
)
def test_lake_keeps_every_form_of_category_and_readers_see_categories(form, tmp_path):
    rows = [
        {
            "label": i % 2,
            "price": 1.0,
            "item": item,
            "user": user,
            "request_id": f"q{i}",
            "row": 0,
            "event_time": DAY,
        }
        for i, (item, user) in enumerate(zip(ITEMS, USERS))
    ]
    if form == "csv":
        write_rows(path := tmp_path / "clicks.csv", rows)
    else:
        table = pa.Table.from_pylist(rows)
        if form == "lake of categories":
            found = pa.array([item for item, _ in expected_categories()], pa.int64())
            table = table.set_column(table.schema.names.index("item"), "item", found)
        elif form != "lake of words":
            encoded = (
                table["item"].cast(pa.binary())
                if "bytes" in form
                else table["item"].dictionary_encode()
            )
            table = table.set_column(table.schema.names.index("item"), "item", encoded)
            table = table.rename_columns({"label": "clicked"} if "lake" not in form else {})
        pq.write_table(table, path := tmp_path / "clicks.parquet")
    named = ColumnNames(label="clicked") if form in ("parquet", "bytes") else ColumnNames()
    reader = find_reader(path, recommender(STRING_FEATURES, data=named))
    with MalformedRows(tmp_path / "malformed.jsonl") as malformed:
        batches = list(reader.batches(malformed))
    assert malformed.num_rows == 0
    assert malformed.schema_mismatches == []
    rows_of_lake = pa.Table.from_batches(batches)
    if form != "lake of categories":
        assert [each or None for each in rows_of_lake["item"].to_pylist()] == [
            each or None for each in ITEMS
        ]
    assert rows_of_lake["user"].to_pylist() == USERS
    pq.write_table(rows_of_lake, path)
    with MalformedRows(tmp_path / "malformed.jsonl") as malformed:
        (batch,) = RawParquet(path=path, features=STRING_FEATURES).batches(malformed)
    assert [(row["item"], row["user"]) for row in batch.to_pylist()] == expected_categories()


@pytest.mark.parametrize("name", ["item", "user"])
@pytest.mark.parametrize(
    "values",
    [
        [True, False, None],
        [7, -1, None],
        [7.0, -1.0, None],
        [2.0**53 - 1, 2.0**52, float("nan")],
        pa.array([2**24 - 1.0, 0, None], pa.float32()),
        pa.array([2**63 - 1, 0, None], pa.uint64()),
        pa.array([2**64 - 1, 2**63, None], pa.uint64()),
        ["True", "FALSE", "NULL"],
        ["18446744073709551615", "-4", " N/A "],
    ],
    ids=[
        "booleans",
        "integers",
        "integers with gaps",
        "large floats",
        "short floats",
        "unsigned",
        "unsigned of 64 bits",
        "booleans as texts",
        "numbers as texts",
    ],
)
def test_lake_and_client_make_same_categories_of_values_of_any_type(tmp_path, name, values):
    rows = [
        {"label": i % 2, "price": 1.0, "request_id": f"q{i}", "row": 0, "event_time": DAY}
        for i in range(3)
    ]
    table = pa.Table.from_pylist(rows)
    for each in STRING_FEATURES.categorical:
        table = table.append_column(each, pa.array(values) if each == name else pa.nulls(3))
    pq.write_table(table, tmp_path / "part.parquet")
    with MalformedRows(tmp_path / "malformed.jsonl") as malformed:
        (batch,) = RawParquet(path=tmp_path / "part.parquet", features=STRING_FEATURES).batches(
            malformed
        )
    in_client = feature_rows(
        {"price": [1.0] * 3, **{each: table[each] for each in STRING_FEATURES.categorical}},
        STRING_FEATURES,
    ).categorical
    assert (
        in_client[:, STRING_FEATURES.categorical.index(name)].tolist()
        == batch.column(name).fill_null(-1).to_pylist()
    )
    assert in_client.max() >= 0


@pytest.mark.parametrize("name", ["item", "user"])
@pytest.mark.parametrize("is_list", [False, True], ids=["column", "list"])
@pytest.mark.parametrize(
    "values",
    [[True, False], ["True", "False"], ["TRUE", "false"], [" true", "fAlSe "], [1, 0], ["1", "0"]],
    ids=["bool", "csv", "any", "spaces", "numbers", "digits"],
)
def test_booleans_are_two_categories_in_lake_and_client_in_any_spelling(
    tmp_path, name, values, is_list
):
    rejected = {"item": pa.string(), "user": pa.int64()}[name]
    features = STRING_FEATURES
    if is_list:
        features = replace(
            STRING_FEATURES, lists=("tags",), list_options={"tags": ListOptions(table=name)}
        )
    column = "tags" if is_list else name
    rows = [
        {"label": i % 2, "price": 1.0, "request_id": f"q{i}", "row": 0, "event_time": DAY}
        for i in range(2)
    ]
    table = pa.Table.from_pylist([{**row, "item": "x", "user": 1} for row in rows])
    own = pa.array([[each] for each in values] if is_list else values)
    table = table.drop_columns([column] if not is_list else []).append_column(column, own)
    pq.write_table(table, path := tmp_path / "part.parquet")
    expected = [1, 0]  # other programs write booleans as 1 and 0
    for with_strings in (
        True,
        False,
    ):  # the file is in the raw schema, and is then read as a file of the lake
        with MalformedRows(tmp_path / "malformed.jsonl") as malformed:
            (batch,) = RawParquet(path=path, features=features, with_strings=with_strings).batches(
                malformed
            )
        held = rejected if with_strings else pa.int64()
        assert batch.schema.field(column).type == (pa.list_(held) if is_list else held)
        pq.write_table(pa.Table.from_batches([batch]), path := tmp_path / "lake.parquet")
    found = batch.column(column).to_pylist()
    assert [each[0] if is_list else each for each in found] == expected
    position = features.position_names.index(features.positions_of(column)[0])
    for sent in (
        (values, own, np.array(values)) if not is_list else ([[each] for each in values], own)
    ):
        given = {"price": [1.0, 1.0], "item": ["x", "x"], "user": [1, 1], column: sent}
        assert feature_rows(given, features).categorical[:, position].tolist() == expected


@pytest.mark.parametrize("name", ["item", "user", "tags"])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            pa.array([7.0, 9007199254741002.0]),
            "9007199254741002.0, expected .*an int or a text: .*below 9007199254740992",
        ),
        (pa.array([7.0, -(2.0**53)]), "expected .*an int or a text"),
        (
            pa.array([7.0, 2.0**24], pa.float32()),
            "16777216.0, expected .*an int or a text: .*below 16777216 only",
        ),
        (pa.array([7.0, float("inf")]), "inf, expected"),
        (pa.array([7.0, 2.5]), "2.5"),
    ],
)
def test_floats_ambiguous_as_ids_are_refused_in_lake_and_client(tmp_path, name, values, message):
    features = replace(
        STRING_FEATURES, lists=("tags",), list_options={"tags": ListOptions(table="user")}
    )
    rows = [
        {"label": i, "price": 1.0, "request_id": f"q{i}", "row": 0, "event_time": DAY}
        for i in range(2)
    ]
    own = {"item": pa.nulls(2), "user": pa.nulls(2), "tags": pa.nulls(2)}
    own[name] = (
        pa.array([[each] for each in values.to_pylist()], pa.list_(values.type))
        if name == "tags"
        else values
    )
    table = pa.Table.from_pylist(rows)
    for each, column in own.items():
        table = table.append_column(each, column)
    pq.write_table(table, path := tmp_path / "part.parquet")
    for with_strings in (True, False):
        with (
            MalformedRows(tmp_path / "malformed.jsonl") as malformed,
            pytest.raises(ContractError, match=message) as said,
        ):
            list(
                RawParquet(path=path, features=features, with_strings=with_strings).batches(
                    malformed
                )
            )
        assert f"part.parquet has {name} of type" in str(said.value)
    arrays = [own[name], own[name].to_pylist() if values.type == pa.float64() else own[name]]
    if name != "tags":
        arrays += [values.to_numpy(), [*values.to_numpy()]]
    for sent in arrays:
        with pytest.raises(ContractError, match=f"column {name}, row 1 is .*{message}"):
            feature_rows(
                {"price": [1.0] * 2, **{each: own[each] for each in own}, name: sent}, features
            )


def test_missing_words_of_lake_are_missing_in_every_kind_of_column(tmp_path):
    words = ["NULL", r"\N", "N/A", "?", " ", "#N/A"]
    features = replace(
        STRING_FEATURES, lists=("tags",), list_options={"tags": ListOptions(type="string")}
    )
    rows = [
        {"label": i % 2, "price": word, "item": word, "user": word, "tags": [word, "red"]}
        | {"request_id": f"q{i}", "row": 0, "event_time": DAY}
        for i, word in enumerate(words)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path := tmp_path / "part.parquet")
    for with_strings in (True, False):
        with MalformedRows(tmp_path / "malformed.jsonl") as malformed:
            (batch,) = RawParquet(path=path, features=features, with_strings=with_strings).batches(
                malformed
            )
        assert malformed.num_rows == 0
        assert [batch.column(each).null_count for each in ("price", "item", "user")] == [
            len(words)
        ] * 3
        assert batch.column("tags").to_pylist() == [
            ["red" if with_strings else hashed("red")]
        ] * len(words)
    in_client = feature_rows(
        [{name: row[name] for name in features.names} for row in rows], features
    )
    assert np.isnan(in_client.dense).all()
    assert in_client.categorical[:, :2].tolist() == [[-1, -1]] * len(words)
    assert in_client.categorical[:, 2].tolist() == [hashed("red")] * len(words)


def test_extraction_notes_words_of_windows_rows_but_no_users(tmp_path):
    features = replace(
        STRING_FEATURES,
        lists=("tags", "friends"),
        categorical_options=dict.fromkeys(
            STRING_FEATURES.categorical, CategoricalOptions(type="string")
        ),
        list_options={"tags": ListOptions(type="string"), "friends": ListOptions(table="user")},
    )
    rows = [
        {"label": i % 2, "price": 1.0, "item": "red shoe" if i % 3 else "hat", "user": f"user {i}"}
        | {"tags": ["new", "hat"][: i % 3], "friends": [f"user {i + 1}"]}
        | {"request_id": f"q{i}", "row": 0, "event_time": DAY + timedelta(minutes=i)}
        for i in range(60)
    ]
    rows.append(
        rows[0] | {"item": "newer", "request_id": "q60", "event_time": DAY + timedelta(minutes=60)}
    )
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "clicks.parquet")
    described = recommender(features, data=ColumnNames(user="user"))
    lake = tmp_path / "lake"
    ingest(
        [tmp_path / "clicks.parquet"],
        described,
        lake=str(lake),
        replay=tmp_path / "replay",
        settings=IngestSettings(),
    )
    opened = Lake(files=LakeFiles(FolderObjects(lake)))
    window = TimeSpan(None, to_micros(rows[-1]["event_time"]))
    dataset = extract(opened, window, folder=tmp_path / "out", recommender=described)
    assert read_texts(local_path(dataset.texts_uri)) == {
        "item": {hashed("red shoe"): "red shoe", hashed("hat"): "hat"},
        "tags": {hashed("new"): "new", hashed("hat"): "hat"},
    }
    assert list(json.loads((tmp_path / "out" / "texts.json").read_text())["item"]) == [
        "red shoe",
        "hat",
    ]
    write_lake(tmp_path / "numbers", shop_rows(60), SHOP)
    assert extracted(tmp_path / "numbers", SHOP, tmp_path / "no words").texts_uri is None


LISTS = Features(
    numeric=(),
    categorical=("item",),
    lists=("tags", "last", "seen"),
    categorical_options={"item": CategoricalOptions(type="string")},
    list_options={
        "tags": ListOptions(type="string", max=2, keep="oldest"),
        "last": ListOptions(max=2, table="item"),
        "seen": ListOptions(max=3),
    },
)
WORD_LISTS = [["red", "", "07", "7"], [], None, ["a b"], [None], ["red", None, "red"], ["-5"]]
NUMBER_LISTS = [[1, 2**52, 3, -1], None, [], [7], [None, 5, None], [2**63 - 1], [None]]


@pytest.mark.parametrize("form", ["lake", "parquet", "large", "bytes", "categories", "csv"])
def test_lake_keeps_every_form_of_list_and_readers_see_categories(form, tmp_path):
    rows = [
        {"label": i % 2, "item": "x", "tags": tags, "last": tags, "seen": seen}
        | {"request_id": f"q{i}", "row": 0, "event_time": DAY}
        for i, (tags, seen) in enumerate(zip(WORD_LISTS, NUMBER_LISTS))
    ]
    words = [[hashed(e) if e != "7" else 7 for e in elements(each)] or None for each in WORD_LISTS]
    numbers = [
        [e if 0 <= e < 2**52 else hashed(str(e)) for e in elements(each)] or None
        for each in NUMBER_LISTS
    ]
    if form == "csv":
        texts = [
            ["|".join("" if e is None else str(e) for e in row[n] or ()) for n in LISTS.lists]
            for row in rows
        ]
        write_rows(
            path := tmp_path / "clicks.csv",
            [row | dict(zip(LISTS.lists, t)) for row, t in zip(rows, texts)],
        )
    else:
        table = pa.Table.from_pylist(rows)
        kinds = {"large": pa.large_list(pa.large_string()), "bytes": pa.list_(pa.binary())}
        for name in ("tags", "last"):
            array = table[name].cast(kinds[form]) if form in kinds else table[name]
            array = pa.array(words, pa.list_(pa.int64())) if form == "categories" else array
            table = table.set_column(table.schema.names.index(name), name, array)
        table = table.rename_columns(
            {"label": "clicked"} if form in ("parquet", "large", "bytes") else {}
        )
        pq.write_table(table, path := tmp_path / "clicks.parquet")
    named = ColumnNames(label="clicked") if form in ("parquet", "large", "bytes") else ColumnNames()
    described = recommender(LISTS, data=named)
    ingest(
        [path],
        described,
        lake=str(tmp_path / "lake"),
        replay=tmp_path / "replay",
        settings=IngestSettings(),
    )
    (in_lake,) = (tmp_path / "lake").rglob("*.parquet")
    rejected = pq.read_table(in_lake, partitioning=None)
    for name, lists in {
        "seen": NUMBER_LISTS,
        **({"tags": WORD_LISTS} if form != "categories" else {}),
    }.items():
        assert list(map(elements, rejected[name].to_pylist())) == list(map(elements, lists))
    with MalformedRows(tmp_path / "malformed.jsonl") as malformed:
        (batch,) = RawParquet(path=in_lake, features=LISTS).batches(malformed)
    assert (malformed.num_rows, malformed.schema_mismatches) == (0, [])
    assert [batch.column(name).to_pylist() for name in LISTS.lists] == [words, words, numbers]
    expected = [
        [
            hashed("x"),
            *padded((tags or [])[:2], 2),
            *padded((tags or [])[-2:], 2),
            *padded((seen or [])[-3:], 3),
        ]
        for tags, seen in zip(words, numbers)
    ]
    assert category_matrix(batch, LISTS).tolist() == expected
    assert category_matrix(batch.slice(3), LISTS).tolist() == expected[3:]


def elements(found):
    return [each for each in found or () if each not in (None, "")]


def padded(found, size):
    return [*found, *[-1] * (size - len(found))]


def test_list_with_malformed_element_and_column_without_lists_are_reported(tmp_path):
    (tmp_path / "clicks.csv").write_text(
        "label,item,tags,last,seen\n1,a,b,c,1|x\n0,a,b,c,1|2\n" + "0,a,b,c,\n" * 200
    )
    files, malformed = [tmp_path / "clicks.csv"], tmp_path / "replay.malformed_rows.jsonl"
    settings = IngestSettings(last_day=DAY.date(), days=1)
    ingest(
        files,
        recommender(LISTS),
        lake=str(tmp_path / "lake"),
        replay=tmp_path / "replay",
        settings=settings,
    )
    assert (
        "seen is '1|x', expected elements separated by '|' or in JSON brackets, each a whole"
        in malformed.read_text()
    )
    (path,) = (tmp_path / "lake").rglob("*.parquet")
    table = pq.read_table(path, partitioning=None)
    pq.write_table(
        table.set_column(table.schema.names.index("seen"), "seen", pa.array([1] * len(table))), path
    )
    with raises(ContractError, "seen", "int64", "expected list<", "int64>"):
        extracted(tmp_path / "lake", LISTS, tmp_path / "out")
    with raises(ContractError, "last", "item"):
        excluded_columns(["last", "seen"], LISTS)
