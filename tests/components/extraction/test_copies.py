"""Tests of repeated rows: the newest copy is used, and the number of older copies is reported."""

import itertools
import random
from collections import defaultdict
from datetime import datetime, timedelta, timezone

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.extraction.copies import newest_copies
from components.extraction.reader import sorted_day
from evergreen.config.features import CategoricalOptions, Features, ListOptions
from evergreen.contracts import raw_rows
from evergreen.contracts.manifests import RawDataset
from evergreen.rows.raw_schema import MalformedRows, lake_schema
from evergreen.runtime.errors import ContractError
from tests.support.errors import raises
from tests.support.lakes import rows_in

START = datetime(2026, 3, 1, tzinfo=timezone.utc)
FEATURES = Features(
    numeric=("price",),
    categorical=("item", "word"),
    lists=("tags",),
    categorical_options={"word": CategoricalOptions(type="string")},
    list_options={"tags": ListOptions(type="string")},
)
SCHEMA = lake_schema(FEATURES)


def row(request: str, number: int = 0, *, seconds: int = 0, **values) -> dict:
    base = {
        "label": 0,
        "price": 1.5,
        "item": 7,
        "word": "a",
        "tags": ["x", "y"],
        "request_id": request,
        "row": number,
    }
    return {
        **dict.fromkeys(SCHEMA.names),
        **base,
        "event_time": START + timedelta(seconds=seconds),
        **values,
    }


def kept(*rows: dict):
    table, copies = newest_copies(pa.Table.from_pylist(list(rows), SCHEMA), FEATURES)
    return table.to_pylist(), (copies.num_equal, copies.num_updated, copies.num_conflicting)


def test_row_written_again_with_its_click_has_click():
    shown, clicked = row("q", seconds=5), row("q", seconds=5, label=1)
    for rows in itertools.permutations([shown, clicked, shown]):
        assert kept(*rows) == ([clicked], (1, 1, 0))


def test_later_of_two_times_counts_even_without_click():
    first, second = row("q", seconds=5, label=1), row("q", seconds=6)
    for rows in itertools.permutations([first, second]):
        assert kept(*rows) == ([second], (0, 1, 0))


@pytest.mark.parametrize(
    "other",
    [
        {"price": 2.5},
        {"price": None},
        {"item": 8},
        {"word": "b"},
        {"tags": ["x"]},
        {"tags": ["xy"]},
    ],
)
def test_copies_with_other_features_are_counted_and_result_has_one_order(other):
    one, two = row("q"), row("q", **other)
    found = [kept(*rows) for rows in itertools.permutations([one, two, row("r")])]
    assert all(each == found[0] for each in found)
    assert found[0][1] == (0, 0, 1)
    assert found[0][0][0] in (one, two)


CONTENT = st.fixed_dictionaries(
    {
        "request": st.sampled_from("ab"),
        "number": st.integers(0, 1),
        "seconds": st.integers(0, 2),
        "label": st.integers(0, 1),
        "price": st.sampled_from([None, 1.5, 2.5]),
        "tags": st.sampled_from([None, ["x"], ["x", "y"]]),
        "score": st.sampled_from([None, 0.5]),
    }
)


@given(st.lists(CONTENT, max_size=12), st.randoms())
@settings(max_examples=60, deadline=None)
def test_newest_copy_of_each_key_counts_in_any_order_and_all_are_counted(contents, source):
    rows = [
        row(each["request"], **{k: v for k, v in each.items() if k != "request"})
        for each in contents
    ]
    found, counts = kept(*rows)
    shuffled = source.sample(rows, len(rows))
    assert kept(*shuffled) == (found, counts)
    by_key = defaultdict(list)
    for each in rows:
        by_key[each["request_id"], each["row"]].append(each)
    newest = {(each["request_id"], each["row"]): each for each in found}
    assert newest.keys() == by_key.keys()
    assert len(newest) == len(found)
    equal = updated = conflicting = 0
    for key, copies in by_key.items():
        winner = newest[key]
        assert winner in copies
        assert (winner["event_time"], winner["label"]) == max(
            (each["event_time"], each["label"]) for each in copies
        )
        distinct = [each for i, each in enumerate(copies) if each not in copies[:i]]
        equal += len(copies) - len(distinct)
        changed = [each for each in distinct if each != winner]
        conflicts = sum(
            any(each[name] != winner[name] for name in FEATURES.names) for each in changed
        )
        conflicting += conflicts
        updated += len(changed) - conflicts
    assert counts == (equal, updated, conflicting)
    order = [(each["event_time"], each["request_id"], each["row"]) for each in found]
    assert order == sorted(order)


def changed(table, name: str, values: list):
    index = table.schema.get_field_index(name)
    return table.set_column(
        index, table.schema.field(index), pa.array(values, table.schema.field(index).type)
    )


@pytest.fixture
def lake(tmp_path):
    def write(**tables):
        folder = tmp_path / "a lake" / "day=2026-03-01"
        folder.mkdir(parents=True, exist_ok=True)
        for name, table in tables.items():
            pq.write_table(table, folder / f"{name}.parquet", row_group_size=50)
        return folder.parent

    return write


def labels(dataset: RawDataset) -> dict:
    rows = rows_in(dataset.train_uri, dataset.holdout_uri)
    return {(each["request_id"], each["row"]): each["label"] for each in rows}


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_clicks_written_as_second_rows_are_learned_from_any_file(lake, run_step, raw_table, names):
    table = raw_table(400, start=START.timestamp(), seconds=3600)
    shown, clicked = (
        changed(table, "label", [0] * 400),
        table.filter(pa.compute.equal(table["label"], 1)),
    )
    dataset = run_step(lake(**dict(zip(names, (shown, clicked)))))
    truth = {(each["request_id"], each["row"]): each["label"] for each in table.to_pylist()}
    assert labels(dataset) == truth
    assert (dataset.num_duplicates, dataset.num_updated, dataset.num_conflicting) == (
        0,
        len(clicked),
        0,
    )


def test_bytes_are_same_whatever_names_of_files(lake, run_step, raw_table, tmp_path):
    table = raw_table(300, start=START.timestamp(), seconds=3600)
    other = changed(table, "price", [None] * 300).slice(0, 100)
    digests = set()
    for i, names in enumerate(itertools.permutations("abc")):
        tables = dict(zip(names, (table, other, table.slice(50, 100))))
        digests.add(run_step(lake(**tables), run=f"run {i}", max_conflicting_fraction=1.0).digest)
    assert len(digests) == 1


def test_keys_that_do_not_name_one_row_are_refused_with_example(lake, run_step, raw_table):
    table = raw_table(400, start=START.timestamp(), seconds=3600)
    sessions = changed(table, raw_rows.REQUEST_ID, [f"s{i // 8}" for i in range(400)])
    sessions = changed(sessions, raw_rows.ROW, [i % 2 for i in range(400)])
    with pytest.raises(ContractError) as caught:
        run_step(lake(a=sessions))
    text = str(caught.value)
    assert (
        "300 of 400 rows (75.00%) have the same request_id and row as another row but other "
        "features" in text
    )
    assert "expected at most 1.00% (extraction.max_conflicting_fraction)" in text
    assert "for example request_id 's" in text
    dataset = run_step(lake(a=sessions), max_conflicting_fraction=0.75)
    assert (dataset.num_conflicting, dataset.num_train_rows + dataset.num_holdout_rows) == (
        300,
        100,
    )


@pytest.mark.parametrize(("num_conflicts", "is_refused"), [(4, False), (5, True)])
def test_small_share_of_conflicts_is_counted_and_larger_one_refused(
    lake, run_step, raw_table, num_conflicts, is_refused
):
    table = raw_table(400, start=START.timestamp(), seconds=3600)
    others = changed(table, "item", [5] * 400).slice(0, num_conflicts)
    folder = lake(a=table, b=others)
    if is_refused:
        with raises(ContractError, "5 of 405 rows (1.23%)"):
            run_step(folder)
    else:
        assert run_step(folder).num_conflicting == 4


def test_day_of_files_counts_its_copies_by_kind(tmp_path):
    source = random.Random(1)
    rows = [row("q", i, seconds=source.randrange(86_400), item=i) for i in range(50)]
    rows += [rows[0], {**rows[1], "label": 1}, {**rows[2], "word": "z"}]
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), tmp_path / "a.parquet")
    with MalformedRows(tmp_path / "m.jsonl") as malformed:
        found = list(
            sorted_day(
                [tmp_path / "a.parquet"], START.date(), features=FEATURES, malformed=malformed
            )
        )
    ((table, copies),) = found
    assert (table.num_rows, copies.num_equal, copies.num_updated, copies.num_conflicting) == (
        50,
        1,
        1,
        1,
    )
    assert copies.example.endswith("with word 'a' and 'z'") or copies.example.endswith(
        "with word 'z' and 'a'"
    )
