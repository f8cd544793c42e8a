"""Tests that the step checks the columns of the manifest's recommender."""

import json
import re
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.validation.measure import read_windows
from components.validation.quarantine import make_domain
from components.validation.schema_versions import read_schema
from evergreen.config.features import CategoricalOptions, Features, ListOptions, category_of
from evergreen.config.spec import ColumnNames, Recommender
from evergreen.contracts import raw_rows
from evergreen.statistics.reference import read_reference
from evergreen.storage.uris import local_path
from testing.validation_models import make_dataset

SHOP = Features(numeric=("price", "age of item"), categorical=("item", "shop.id", "city <b>"))
NUMBERS = Features(numeric=("price", "age of item"), categorical=())
CATEGORIES = Features(numeric=(), categorical=("item",))
LISTS = Features(
    numeric=("price",),
    categorical=("item",),
    lists=("tags", "last"),
    list_options={
        "tags": ListOptions(max=3, keep="oldest"),
        "last": ListOptions(max=2, table="item"),
    },
)
EVERY_KIND = pytest.mark.parametrize(
    "features", [SHOP, NUMBERS, CATEGORIES, LISTS], ids=["both", "numbers", "categories", "lists"]
)
ROWS = 3000
NAMES = ColumnNames()


def shop_rows(
    features: Features, *, seed: int, start: float = 1_760_000_000.0, **replaced
) -> pa.Table:
    """Return rows of the recommender, each feature with its own distribution.

    The keys of `replaced` are kind and position, such as `numeric0`.
    """
    random = np.random.default_rng(seed)
    columns = {raw_rows.LABEL: (random.random(ROWS) < 0.3).astype(np.int32)}
    for i, name in enumerate(features.numeric):
        columns[name] = replaced.get(
            f"numeric{i}", random.lognormal(3 - i, 1, ROWS).astype(np.float32)
        )
    for i, name in enumerate(features.categorical):
        columns[name] = replaced.get(f"categorical{i}", random.integers(0, 20 + i, ROWS))
    for i, name in enumerate(features.lists):
        lists = [
            random.integers(0, 20, size).tolist() or None for size in random.integers(0, 6, ROWS)
        ]
        columns[name] = replaced.get(f"lists{i}", pa.array(lists, pa.list_(pa.int64())))
    columns[raw_rows.REQUEST_ID] = [f"request {seed} {i // 10}" for i in range(ROWS)]
    columns[raw_rows.ROW] = np.arange(ROWS, dtype=np.int32) % 10
    times = ((start + np.arange(ROWS)) * 1e6).astype(np.int64)
    columns[raw_rows.EVENT_TIME] = pa.array(times).cast(pa.timestamp("us", tz="UTC"))
    return pa.table(columns)


@pytest.fixture
def write(tmp_path):
    """Writes a recommender's rows as training rows, and returns the manifest's path."""

    def make(table, features, name, settings=(), data=NAMES, **facts):
        folder = tmp_path / name / "train"
        folder.mkdir(parents=True)
        pq.write_table(table, folder / "part-0.parquet")
        recommender = Recommender(
            name="shop", features=features, data=data, settings=dict(settings)
        )
        dataset = replace(
            make_dataset(folder, table.num_rows, digest=name), recommender=recommender, **facts
        )
        dataset.write(tmp_path / name / "raw.json")
        return tmp_path / name / "raw.json"

    return make


@EVERY_KIND
def test_rounds_are_checked_by_recommenders_columns(step, write, release_model, features):
    code, first = step(write(shop_rows(features, seed=0), features, "first"))
    assert (code, first.decision, first.findings) == (0, "pass", [])
    schema = local_path(first.schema_uri).read_text()
    assert re.findall(r'^  name: "(.+)"', schema, re.M) == [raw_rows.LABEL, *features.names]
    release_model(first)
    code, second = step(write(shop_rows(features, seed=1), features, "second"), run="r2")
    assert (code, second.decision, second.findings) == (0, "pass", [])
    lengths = tuple(f"{name}/length" for name in features.lists)
    counted = (*features.numeric, *lengths, *features.categorical, *features.lists)
    assert [entry["feature"] for entry in second.drift] == list(counted)
    document = json.loads(local_path(second.json_uri).read_bytes())
    kinds = {column["column"]: column["kind"] for column in document["columns"]}
    numbers = dict.fromkeys(features.numeric, "number")
    categories = dict.fromkeys(features.categorical + features.lists, "category")
    assert kinds == {raw_rows.LABEL: "label", **numbers, **categories}
    (newest,) = {
        tuple(window.columns) for window in read_windows(local_path(second.windows_uri)).windows
    }
    assert newest == counted
    reference = read_reference(local_path(second.reference_uri))
    assert tuple(reference.profile.columns) == counted
    assert reference.features.names == features.names
    assert reference.features.position_names == features.position_names


@pytest.mark.parametrize(
    ("features", "moved", "values"),
    [
        (SHOP, "numeric1", np.full(ROWS, 7, np.float32)),
        (SHOP, "categorical2", np.arange(ROWS) % 2),
        (NUMBERS, "numeric0", np.arange(ROWS, dtype=np.float32)),
        (CATEGORIES, "categorical0", np.arange(ROWS) % 2),
        (
            LISTS,
            "lists0",
            pa.array([[i % 5] * (i % 6) or None for i in range(ROWS)], pa.list_(pa.int64())),
        ),
        (LISTS, "lists1/length", pa.array([[i % 20] for i in range(ROWS)], pa.list_(pa.int64()))),
    ],
)
def test_column_that_drifted_is_reported_under_its_name_and_no_other_is(
    step, write, release_model, features, moved, values
):
    release_model(step(write(shop_rows(features, seed=0), features, "first"))[1])
    column, *length = moved.split("/")
    code, report = step(
        write(shop_rows(features, seed=1, **{column: values}), features, "second"), run="r2"
    )
    name = getattr(features, column[:-1])[int(column[-1])]
    assert (code, report.decision) == (0, "warn")
    found = {finding.column for finding in report.findings if finding.rule == "drift"}
    assert found == {"/".join([name, *length])}


def test_column_served_otherwise_than_trained_on_is_named(step, write, tmp_path):
    trained = shop_rows(SHOP, seed=0)
    city = SHOP.categorical[2]
    served = trained.set_column(
        trained.schema.get_field_index(city), city, pa.array(np.zeros(ROWS, np.int64))
    )
    (tmp_path / "archive" / "day=2025-10-09").mkdir(parents=True)
    pq.write_table(served, tmp_path / "archive" / "day=2025-10-09" / "part-0.parquet")
    item = SHOP.categorical[0]
    brought = served.set_column(
        served.schema.get_field_index(item), item, pa.array(["a word"] * ROWS)
    )
    pq.write_table(brought, tmp_path / "archive" / "day=2025-10-09" / "brought.parquet")
    words = replace(SHOP, categorical_options={item: CategoricalOptions(type="string")})
    _, report = step(write(trained, words, "first"), f"--served={tmp_path / 'archive'}")
    assert [finding.column for finding in report.findings if finding.rule == "skew"] == [city]


def test_feature_that_changed_its_kind_is_refused_by_name(step, write, release_model, capsys):
    release_model(step(write(shop_rows(SHOP, seed=0), SHOP, "first"))[1])
    changed = Features(numeric=("item",), categorical=("shop.id",))
    code, _ = step(write(shop_rows(changed, seed=1), changed, "second"), run="r2")
    assert code == 2
    assert (
        "feature item is numeric, and was categorical in the champion's rows"
        in capsys.readouterr().err
    )


def test_levels_of_single_columns_take_number_of_columns_that_there_are(step, write, release_model):
    """A numeric column has three statistical tests and a categorical column two.

    All tests of a run together have the false-alarm rate that a run may have.
    """
    seen = {}
    for features in (SHOP, NUMBERS, CATEGORIES):
        first = step(
            write(shop_rows(features, seed=0), features, f"first {len(features.names)}"),
            champion="none",
        )[1]
        release_model(first)
        second = write(shop_rows(features, seed=1), features, f"second {len(features.names)}")
        entries = step(second, run=f"r{len(features.names)}")[1].drift
        seen[features.names] = {entry["feature"]: entry["detectable"] for entry in entries}
    assert seen[NUMBERS.names]["price"] < seen[SHOP.names]["price"]
    assert seen[CATEGORIES.names]["item"] < seen[SHOP.names]["item"]


def test_lists_are_compared_and_quarantined_by_elements_and_may_grow(
    step, write, tmp_path, release_model
):
    trained = shop_rows(LISTS, seed=0, lists1=pa.array([[i % 20] for i in range(ROWS)]))
    longer = pa.array(
        [
            [*(each or [])[:3], 99] if len(each or []) > 2 else each
            for each in trained["tags"].to_pylist()
        ]
    )
    served = trained.set_column(trained.schema.get_field_index("tags"), "tags", longer)
    last = pa.array([[*(each or [])[:-1], 5] for each in trained["last"].to_pylist()])
    served = served.set_column(served.schema.get_field_index("last"), "last", last)
    (tmp_path / "archive" / "day=2025-10-09").mkdir(parents=True)
    pq.write_table(served, tmp_path / "archive" / "day=2025-10-09" / "part-0.parquet")
    _, first = step(write(trained, LISTS, "first"), f"--served={tmp_path / 'archive'}")
    (found,) = [finding for finding in first.findings if finding.rule == "skew"]
    differing = sum((each or [])[-1:] != [5] for each in trained["last"].to_pylist())
    assert (
        f"last differs from the served value in {differing:,} of 3,000 joined rows" in found.detail
    )
    schema = read_schema(local_path(first.schema_uri))
    (tags,) = (feature for feature in schema.feature if feature.name == "tags")
    tags.string_domain.value.extend(str(value) for value in range(19))
    (batch,) = trained.to_batches()
    assert (
        set(make_domain(schema, LISTS)(batch))
        == {at for at, each in enumerate(trained["tags"].to_pylist()) if 19 in (each or [])}
        != set()
    )
    release_model(first)
    _, second = step(write(shop_rows(LISTS, seed=1), LISTS, "second"), run="r2")
    assert {(each.column, each.rule) for each in second.findings} == {("last/length", "drift")}


def test_people_are_shown_words_and_no_user(step, write, release_model, tmp_path):
    features = Features(
        numeric=(),
        categorical=("item", "user"),
        lists=("friends",),
        list_options={"friends": ListOptions(table="user")},
    )
    words = [f"item {i}" for i in range(20)]
    (tmp_path / "texts.json").write_text(json.dumps({"item": words}))
    facts = {"data": ColumnNames(user="user"), "texts_uri": (tmp_path / "texts.json").as_uri()}
    items, users, moved = (
        np.array([category_of(word) for word in words]),
        np.arange(20) + 77_100_200,
        {},
    )
    for seed, kinds in ((0, 20), (1, 2)):
        drawn = np.random.default_rng(seed).integers(0, kinds, ROWS)
        friends = pa.array(users[drawn][:, None].tolist(), pa.list_(pa.int64()))
        moved[seed] = {
            "categorical0": items[drawn],
            "categorical1": users[drawn],
            "lists0": friends,
        }
    release_model(
        step(write(shop_rows(features, seed=0, **moved[0]), features, "first", **facts))[1]
    )
    _, report = step(
        write(shop_rows(features, seed=1, **moved[1]), features, "second", **facts), run="r2"
    )
    said = {found.column: found.detail for found in report.findings if found.rule == "drift"}
    assert set(said) == {"item", "user", "friends"}
    assert re.search("value 'item [01]' went from", said["item"])
    assert "a user went from" in said["user"]
    assert "a user went from" in said["friends"]
    columns = {
        column["column"]: column
        for column in json.loads(local_path(report.json_uri).read_bytes())["columns"]
    }
    assert {bar["label"] for bar in columns["item"]["bars"]} < {repr(word) for word in words}
    assert columns["user"]["distinct"] == 2
    page = local_path(report.report_uri).read_text()
    for shown in (repr(report.checks) + json.dumps(report.drift), json.dumps(columns), page):
        assert "771002" not in shown
        assert re.search("('|&#39;)item [01]('|&#39;)", shown)
