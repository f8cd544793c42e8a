"""Tests of `evergreen init`: columns are guessed, and the draft is valid."""

import datetime
import gzip

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evergreen.config.data import ColumnNames
from evergreen.config.features import CategoricalOptions, Features, ListOptions, NumericOptions
from evergreen.recommender_file.draft import MANY, draft, read_sample
from evergreen.recommender_file.form import parse_recommender
from evergreen.runtime.errors import ContractError
from tests.support.errors import raises

STRING = CategoricalOptions(type="string")
CLICKS = """\
impression_id,slot,ts,clicked,price,stock,item_id,title,day,weekday
a,0,2026-11-01T08:00:00Z,0,1.5,3.0,11,Red shoe,2026-11-01,6
a,1,2026-11-01T08:00:00Z,1,,,12,"Boots, black",2026-11-01,6
b,0,2026-11-02T08:00:00Z,0,0.5,-2.0,4294967295,Hat,2026-11-02,0
"""


def drafted(path):
    text = draft(read_sample(path), name="shop")
    return text, parse_recommender(text, source="draft")


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("form", ["csv", "tsv", "csv.gz", "bom"])
def test_columns_of_text_file_get_their_roles(form, tmp_path):
    text = "\n".join(
        line.replace(",", "\t") for line in CLICKS.replace('"Boots, black"', "Boots").splitlines()
    )
    content = {
        "csv": CLICKS,
        "tsv": text,
        "csv.gz": gzip.compress(CLICKS.encode()),
        "bom": "\ufeff" + CLICKS,
    }[form]
    comments, recommender = drafted(write(tmp_path / f"clicks.{form}", content))
    assert recommender.data == ColumnNames(
        label="clicked", request_id="impression_id", row="slot", event_time="ts"
    )
    assert recommender.features == Features(
        numeric=("price", "stock"),
        categorical=("item_id", "title", "weekday"),
        numeric_options={"stock": NumericOptions(transform=("standardize",))},
        categorical_options={"title": STRING},
    )
    assert "# float; 33.3% missing; 2 distinct values, 0.5 to 1.5" in comments
    assert "title: {type: string}  # text; 3 distinct values such as Red shoe. Texts" in comments
    assert (
        "#   day: text; 2 distinct values such as 2026-11-01. Times (2026-11-01 to 2026-11-02, 2 "
        "rows a" in comments
    )


def test_columns_of_parquet_file_get_their_roles(tmp_path):
    when = [datetime.datetime(2026, 11, day, tzinfo=datetime.timezone.utc) for day in (1, 2, 3)]
    columns = {
        "label": [0, 1, 0],
        "event_time": when,
        "gaps": [1.0, None, 200.0],
        "float_nan": [0.5, float("nan"), 2.5],
        "inf": [0.5, float("inf"), 2.5],
        "device_id": pa.array([1, 2, 2**40]),
        "genres": [["a"], ["b"], None],
        "seen": [[1], [2, 3, 4], []],
        "embedding": [[0.5], [1.5], []],
        "words": pa.array(["x", "y", "x"]).dictionary_encode(),
        "zip": ["01067", "01069", "80331"],
        "nothing": pa.nulls(3),
        "constant": [7, 7, 7],
        "position": [1, 2, 3],
        "is_new": [True, False, True],
    }
    pq.write_table(pa.table(columns), tmp_path / "clicks.parquet")
    comments, recommender = drafted(tmp_path / "clicks.parquet")
    assert recommender.features == Features(
        numeric=("float_nan",),
        categorical=("gaps", "device_id", "words", "zip", "is_new"),
        categorical_options=dict.fromkeys(("words", "zip", "is_new"), STRING),
        lists=("genres", "seen"),
        list_options={"genres": ListOptions(type="string", max=1), "seen": ListOptions(max=3)},
    )
    assert (
        "genres: {type: string, max: 1}  # list of texts; 33.3% missing; 2 distinct lists such as "
        "a. A list, 2 distinct" in comments
    )
    assert recommender.data == ColumnNames()
    left_out = comments.partition("# Left out:")[2]
    reasons = {
        "inf": "Infinite values",
        "embedding": "Columns of type list<",
        "nothing": "are not supported yet",
        "constant": "the same value in all rows",
        "position": "Every row has a column of this name",
    }
    for name, reason in reasons.items():
        (line,) = (line for line in left_out.splitlines() if line.startswith(f"#   {name}: "))
        assert reason in line


@pytest.mark.parametrize(
    ("column", "weight"), [("Sample-Weight", "Sample-Weight"), ("weight", None)]
)
def test_column_named_as_sample_weight_is_one_and_no_feature(column, weight, tmp_path):
    rows = f"clicked,price,{column}\n0,0.5,10\n1,1.5,1.5\n"
    comments, recommender = drafted(write(tmp_path / "a.csv", rows))
    assert recommender.data.weight == weight
    assert (column in recommender.features.names) == (weight is None)
    assert ("  weight: " in comments) == (weight is not None)


def test_texts_with_bars_are_lists_unless_bars_are_few(tmp_path):
    rows = [
        "clicked,tags,seen,title",
        "0,red|blue,7|8,Boots",
        "1,red,7,A|B",
        "0,,,Hat",
        "1,blue,9,Cap",
        "0,x,1,Shoe",
    ]
    options = {"tags": ListOptions(type="string", max=2), "seen": ListOptions(max=2)}
    _, recommender = drafted(write(tmp_path / "a.csv", "\n".join(rows)))
    assert (recommender.features.lists, recommender.features.list_options) == (
        ("tags", "seen"),
        options,
    )
    assert recommender.features.categorical == ("title",)


def test_several_zero_one_columns_are_resolved_by_name_or_question(tmp_path):
    named = write(tmp_path / "a.csv", "is_new,click,price\n0,1,0.5\n1,0,1.5\n")
    assert drafted(named)[1].data.label == "click"
    unnamed = write(tmp_path / "b.csv", "is_new,is_red,price\n0,1,0.5\n1,0,1.5\n")
    with raises(ContractError, "draft:8", "data.label", "FILL IN"):
        drafted(unnamed)
    assert "label: FILL IN  # which of 'is_new', 'is_red' says whether" in draft(
        read_sample(unnamed), name="shop"
    )


def test_log_without_label_leads_to_question_and_invalid_file(tmp_path):
    path = write(tmp_path / "a.csv", "price,clicks\n0.5,3\n1.5,9\n")
    text = draft(read_sample(path), name="shop")
    assert "label: FILL IN  # no column holds only 0 and 1" in text
    with raises(ContractError, "d:8", "data.label", "FILL IN", "expected the answer"):
        parse_recommender(text, source="d")
    assert parse_recommender(text.replace("FILL IN", "sold"), source="d").data.label == "sold"


def test_log_without_features_of_one_kind_is_drafted_without_them(tmp_path):
    comments, recommender = drafted(write(tmp_path / "a.csv", "clicked,price\n0,0.5\n1,1.5\n"))
    assert "  categorical: []  # none found" in comments
    assert recommender.features.names == ("price",)


def test_column_with_invalid_feature_name_is_left_out(tmp_path):
    comments, recommender = drafted(
        write(tmp_path / "a.csv", "clicked,price,item_id,a/b\n0,0.5,1,2\n1,1.5,2,3\n")
    )
    assert recommender.features.names == ("price", "item_id")
    assert "#   a/b: " in comments


def test_lines_that_are_no_rows_are_counted_and_named_in_draft(tmp_path):
    comments, _ = drafted(write(tmp_path / "a.csv", "clicked,price,item_id\n0,1.5,3\n1\n1,2.5,4\n"))
    assert (
        "from all 2 rows of 'a.csv'.\n# 1 line beside these could not be read as rows, first:"
        in comments
    )
    assert "#   line 3: 1 columns, expected 3" in comments


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "", "is empty"),
        ("a.csv", "clicked,price\n", "contains no rows"),
        ("a.csv", "clicked,price", "contains no rows"),
        ("a.csv", "clicked,price,price\n0,1,2\n", r"names the columns \['price'\] twice"),
        ("a.tsv", "0\t17\tab\n1\t3\tab\n", "has no header: its first line begins with '0'"),
        ("a.csv", b"clicked,price\n0,\xff\n", "contains no rows.* byte 0xff is not UTF-8"),
        ("a.csv.gz", gzip.compress(b"clicked,price\n" + b"0,1\n" * 999)[:50], "is truncated"),
        ("a.parquet", b"PAR1", "is not a readable Parquet file"),
        (
            "a.csv",
            "clicked,ts,other\n0,2026-11-01,2026-11-01\n1,2026-11-02,2026-11-02\n",
            "has no column that can be a feature: other: times",
        ),
        ("absent.csv", None, "is not a file, expected a file of rows"),
    ],
)
def test_file_of_which_nothing_can_be_drafted_is_refused_with_reason(
    name, content, message, tmp_path
):
    if content is not None:
        write(tmp_path / name, content)
    with pytest.raises(ContractError, match=message):
        drafted(tmp_path / name)


CELLS = (
    st.none()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_infinity=True)
    | st.text(max_size=5)
    | st.dates()
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8), st.lists(CELLS, min_size=4, max_size=4), max_size=6
    ),
    st.lists(st.integers(0, 1), min_size=4, max_size=4),
)
def test_draft_of_any_log_is_valid_file(tmp_path, columns, clicks):
    table = {"price_of_it": [0.5, 1.5, 2.5, 3.5], "item_id": [1, 2, 3, 4], "clicked": clicks}
    for name, values in columns.items():
        kinds = {type(value) for value in values if value is not None}
        table.setdefault(
            name, values if len(kinds) == 1 else [None if v is None else str(v) for v in values]
        )
    pq.write_table(pa.table(table), tmp_path / "clicks.parquet")
    text = draft(read_sample(tmp_path / "clicks.parquet"), name="shop")
    answered = "\n".join(line for line in text.splitlines() if ": FILL IN  #" not in line)
    assert "price_of_it" in parse_recommender(answered, source="draft").features.numeric


def test_column_with_very_many_categories_is_reported_to_cost_memory(tmp_path):
    users, items = [f"u{n}" for n in range(MANY)], [f"i{n}" for n in range(MANY - 1)]
    columns = {
        "label": [0, 1] * (MANY // 2),
        "user": users,
        "item": [*items, items[0]],
        "price": list(range(MANY)),
    }
    pq.write_table(pa.table(columns), tmp_path / "clicks.parquet")
    text, recommender = drafted(tmp_path / "clicks.parquet")
    assert set(recommender.features.categorical) == {"user", "item"}
    assert [
        line.split(":")[0].strip()
        for line in text.splitlines()
        if "docs/kubernetes/scale.md" in line
    ] == ["user"]
