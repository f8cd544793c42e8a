"""`recommender.yaml`: what is read from it, what is written back, and the message of each kind of mistake."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.contracts.criteo import CRITEO_RECOMMENDER
from components.contracts.features import Features, ListOptions, NumericOptions
from components.contracts.raw_rows import OWN_COLUMNS, ColumnNames
from components.contracts.recommender import Recommender
from components.runtime.errors import ContractError
from pipelines.recommender_file.form import compare, format_recommender, parse_recommender, read_recommender
from tests.support.paths import REPOSITORY

SHOP = """\
format: evergreen/recommender/1
name: shop
data:
  label: clicked
  event_time: ts
features:
  numeric: [price]
  categorical:
    - item
    - C1..C3
training:
  learning_rate: 1e-3
  round_rates: [0.1, 1.5]
"""


def test_a_file_says_name_columns_and_settings():
    assert parse_recommender(SHOP, source="shop.yaml") == Recommender(
        name="shop",
        data=ColumnNames(label="clicked", event_time="ts"),
        features=Features(numeric=("price",), categorical=("item", "C1", "C2", "C3")),
        settings={"training": {"learning_rate": 0.001, "round_rates": [0.1, 1.5]}},
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: shop", "nmae: shop", "2: nmae is no key, expected name"),
        ("name: shop", "nothing: shop", "2: nothing is no key, expected one of format, name, data, features, extr"),
        ("name: shop\n", "", "1: name is missing, expected the keys format, name, features"),
        ("name: shop", "name: Shop", "2: recommender name is 'Shop', expected a letter"),
        ("name: shop", "name: shop_canary", "2: recommender name is 'shop_canary', expected no _candidate or _canary"),
        ("name: shop", "name: shop\nname: store", "3: name is there twice, in line 2 too"),
        ("der/1", "der/2", "1: format is 'evergreen/recommender/2', expected evergreen/recommender/1"),
        ("label: clicked", "lable: clicked", "4: data.lable is no setting, expected label"),
        ("label: clicked", "label: 1", "4: data.label is 1, expected str"),
        ("label: clicked", "label: ts", "3: data: columns are named ['ts', 'request_id', 'row', 'ts'], expected a"),
        ("numeric:", "numercal:", "7: features.numercal is no key, expected numeric"),
        ("numeric:", "times:", "7: features.times is no key, expected one of numeric, categorical, lists"),
        ("numeric: [price]", "lists: {tags: {table: shop}}", "6: table of tags is 'shop', expected a categorical"),
        (
            "- item\n    - C1..C3",
            "item: {embed: 4}\n    shop:\nmodel: {kind: dlrm}",
            "9: features.categorical.item.embed is 4, expected 16, the model's embedding_dim: model.kind dlrm",
        ),
        ("[price]", "{price: 5}", "7: features.numeric.price is 5, expected keys with values"),
        ("[price]", "{price: false}", "7: features.numeric.price is False, expected keys with values"),
        ("[price]", "{price: {fil: 1}}", "7: features.numeric.price.fil is no setting, expected fill"),
        ("[price]", "{price: {fill: x}}", "7: features.numeric.price.fill is 'x', expected float"),
        ("- item\n    - C1..C3", "item: {size: 3}", "9: features.categorical.item.size is no setting, expected one of"),
        ("[price]", "price", "7: features.numeric is 'price', expected a list of columns' names"),
        ("[price]", "[7]", "7: features.numeric[0] is 7, expected a column's name; in quotes where it is a number"),
        ("clicked", "clicked\n  weight: price", "8: features.numeric[0] is 'price', which is the weight of the rows"),
        ("ts", "ts\n  weight: ts", "3: data: columns are named ['clicked', 'request_id', 'row', 'ts', 'ts'], expected"),
        ("[price]", "[clicked]", "7: features.numeric[0] is 'clicked', which is the label"),
        ("- item", "- position", "9: features.categorical[0] is 'position', which every row has beside its features"),
        ("- item", "- price", "9: features.categorical[0] is 'price', which is in line 7 too, expected each feature"),
        ("- item", "- C3", "10: features.categorical[1] is 'C3', which is in line 9 too"),
        ("C1..C3", "C3..C1", "10: features.categorical[1] is 'C3..C1', expected the smaller number first"),
        ("C1..C3", "C1..C99999", "10: features.categorical[1] is 'C1..C99999', a range of 99,999 names, expected"),
        ("training:", "trainin:", "11: trainin is no key, expected training"),
        ("training:", "training: 5\nmodel:", "11: training is 5, expected keys with values"),
        ("training:", "training:\nmodel:", "11: training is empty, expected keys with values"),
        ("1e-3", "1e999", "12: training.learning_rate is 1e999, expected a finite number"),
        ("1e-3", "[", "14: while parsing a flow sequence in line 12, expected ',' or ']', but got"),
        ("1e-3", "!!python/object:os.system x", "12: could not determine a constructor for the tag"),
        ("1e-3", "*rate", "12: alias *rate is refused"),
        ("learning_rate:", "learning_rate: 1\n  7:", "13: key '7' is no text, expected a name"),
        ("training:", "---\ntraining:", "11: expected a single document in the stream in line 1, but found another"),
        ("learning_rate:", "learnin_rate:", "12: training.learnin_rate is no setting, expected learning_rate"),
        ("1e-3", "-1", "12: training: learning_rate is -1.0, expected"),
        ("1e-3", "high", "12: training.learning_rate is 'high', expected float"),
        ("learning_rate: 1e-3", "seed: true", "12: training.seed is True, expected int"),
        ("1.5]", "a]", "13: training.round_rates[1] is 'a', expected float"),
        ("training:", "monitor:\n  window_rows: 5\ntraining:", "12: monitor: window_rows is 5, expected at least"),
        ("[price]", "[a/b]", "6: features are named ['a/b'], expected printable characters without a slash"),
        ("shop", "sh\0op", "2: character '\\x00', expected printable ones"),
    ],
)
def test_a_mistake_is_named_by_file_line_path_value_and_what_was_expected(old, new, message):
    assert SHOP.count(old) == 1 or old == "shop"
    with pytest.raises(ContractError, match=f"^shop.yaml:{re.escape(message)}"):
        parse_recommender(SHOP.replace(old, new, 1), source="shop.yaml")


@pytest.mark.parametrize(
    ("column", "options", "message"),
    [
        ("tags", "max: 0", "max is 0, expected at least 1"),
        ("tags", "table: item, type: string", "type is 'string' beside table 'item', expected the table's type alone"),
        ("tags", "embed: 0", "embed is 0, expected at least 1"),
        ("tags", "table: item, embed: 4", "embed is 4 beside table 'item', expected the table's embed alone"),
        ("price", "embed: 4", "embed is 4 without quantile_buckets, expected none"),
        ("price", "fill: 1e39", "fill is 1e+39, expected a finite float32"),
        ("price", "transform: [clip(-1e400..1)]", "a bound of clip is -inf, expected a finite float32"),
        (
            "price",
            "transform: [clip(0), log1p, quantile_buckets(32)]",
            "transform is ['clip(0)', 'log1p', 'quantile_buckets(32)'], expected at most",
        ),
        (
            "price",
            "transform: [quantile_buckets(32), clip(0)]",
            "transform is ['quantile_buckets(32)', 'clip(0)'], expected at most one clip",
        ),
        ("price", "transform: [quantile_buckets(1)]", "transform has quantile_buckets(1), expected 2 to 1024 buckets"),
        (
            "price",
            "transform: [quantile_buckets]",
            "transform holds 'quantile_buckets', which is not supported, expected clip(",
        ),
        (
            "price",
            "indicator: true, transform: [quantile_buckets(8)]",
            "fill is 0.0 and indicator True beside quantile_buckets, expected neither",
        ),
        ("price", "transform: [log1p]", "transform is ['log1p'], expected a clip at 0 or more before log1p"),
        ("price", "transform: [log2]", "transform holds 'log2', which is not supported, expected clip("),
        ("price", "transform: ['clip(2..1)']", "transform clips to [2.0, 1.0]"),
        (
            "price",
            "transform: [minmax, standardize]",
            "transform is ['minmax', 'standardize'], expected each of clip, log1p and one",
        ),
    ],
)
def test_a_mistake_in_the_options_of_a_column_is_named_with_the_column(column, options, message):
    kind = "lists" if column == "tags" else "numeric"
    text = SHOP.replace("numeric: [price]", f"{kind}: {{{column}: {{{options}}}}}")
    with pytest.raises(ContractError, match=f"^shop.yaml:7: features.{kind}.{column}: {re.escape(message)}"):
        parse_recommender(text, source="shop.yaml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty, expected a recommender"),
        (b"# nothing yet\n", "is empty, expected a recommender"),
        (b"just words", ":1: the file is 'just words', expected keys with values"),
        (b"\xff\xfe", "is no text in UTF-8"),
        (b"[" * 5000, "is nested too deeply"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_what_is_no_such_file_at_all_is_named_with_its_path(content, message, tmp_path):
    path = tmp_path / "shop.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ContractError, match=f"^{re.escape(str(path))}.*{re.escape(message)}"):
        read_recommender(path)


def test_a_file_without_any_feature_is_refused():
    with pytest.raises(ContractError, match="shop.yaml:3: features names no column"):
        parse_recommender("format: evergreen/recommender/1\nname: shop\nfeatures: {numeric: []}", source="shop.yaml")


def test_words_that_older_yaml_takes_for_something_else_are_texts_and_quoted_ranges_are_names():
    text = "format: evergreen/recommender/1\nname: shop\n"
    text += "features: {numeric: [on, no, 2026-11-23, 1:30, 010, 'a1..a3'], categorical: [yes]}"
    assert parse_recommender(text, source="it").features.numeric == ("on", "no", "2026-11-23", "1:30", "010", "a1..a3")


def test_numbers_in_a_range_keep_their_leading_zeros():
    text = "format: evergreen/recommender/1\nname: shop\nfeatures: {numeric: [price], categorical: [c08..c11]}"
    assert parse_recommender(text, source="it").features.categorical == ("c08", "c09", "c10", "c11")


def test_the_example_describes_criteos_recommender():
    assert read_recommender(REPOSITORY / "examples/criteo/recommender.yaml") == CRITEO_RECOMMENDER


def test_criteos_columns_are_written_as_two_ranges():
    assert format_recommender(CRITEO_RECOMMENDER) == (
        "format: evergreen/recommender/1\nname: click_model\n"
        "features:\n  numeric: [I1..I13]\n  categorical: [C1..C26]\n"
    )


def test_columns_may_have_options_and_a_range_of_them_the_same():
    options = "  numeric: {price: {indicator: true, transform: [clip(-1.5..3e2), minmax]}, n1..n2: {fill: 2}, age: }\n"
    read = parse_recommender(SHOP.replace("  numeric: [price]\n", options), source="it")
    assert read.features.numeric == ("price", "n1", "n2", "age")
    assert read.features.numeric_options == {
        "price": NumericOptions(indicator=True, transform=("clip(-1.5..3e2)", "minmax")),
        "n1": NumericOptions(fill=2.0),
        "n2": NumericOptions(fill=2.0),
    }
    assert read.features.options_of("price").bounds == (-1.5, 300.0)
    assert read.features.options_of("price").transform[0] == "clip(-1.5..300)"
    added, changed = compare(parse_recommender(SHOP, source="it"), read)[:2]
    assert added == "features.numeric: without none -> with n1, n2, age"
    assert changed.startswith("features.numeric.price: {} -> {'indicator': True, 'transform': [")


def test_equal_options_are_one_recommender_however_they_are_written():
    said = "[price]", "{price: {fill: -0.0, transform: [clip(-0.0..+3e2), minmax]}}"
    other = "[price]", "{price: {transform: ['clip(0..300)', minmax]}}"
    usual = "[price]", "{price: {fill: 0, transform: [clip(0e1), log1p, standardize]}}"
    digests = [parse_recommender(SHOP.replace(*each), source="it").digest for each in (said, other, usual)]
    assert digests[0] == digests[1]
    assert digests[2] == parse_recommender(SHOP, source="it").digest


NUMBERED = st.builds(
    lambda prefix, first: f"{prefix}{first}", st.sampled_from(["", "a", "1..", "a..b", "0"]), st.integers(0, 20)
)
NAMES = st.text(min_size=1) | NUMBERED | st.sampled_from(["true", "null", "~", "1e7", "a: b", "x #y", "- x", "I1..I3"])
NAMES = NAMES.map(str.strip).filter(
    lambda name: name and name.isprintable() and "/" not in name and name not in OWN_COLUMNS
)
RUNS = st.builds(
    lambda prefix, first, width, length: [f"{prefix}{number:0{width}}" for number in range(first, first + length)],
    st.sampled_from(["I", "x1y", "a..", "9"]),
    st.integers(0, 10**9),
    st.integers(0, 10),
    st.integers(1, 6),
)
OPTIONS = st.builds(
    NumericOptions,
    fill=st.floats(-1e9, 1e9),
    indicator=st.booleans(),
    transform=st.sampled_from([("clip(0)", "log1p", "standardize"), (), ("clip(-2..1e3)", "minmax"), ("standardize",)]),
) | st.builds(NumericOptions, transform=st.sampled_from([("quantile_buckets(9)",), ("clip(0)", "quantile_buckets(2)")]))
LIST_OPTIONS = st.builds(ListOptions, max=st.integers(1, 99), keep=st.sampled_from(["newest", "oldest"])) | st.builds(
    ListOptions, pool=st.sampled_from(["mean", "sum"]), table=st.just("item")
)
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "training": st.fixed_dictionaries(
            {"learning_rate": st.floats(1e-300, 1e300) | st.integers(1)},
            optional={"round_rates": st.lists(st.floats(1e-9, 10.0), min_size=1), "precision": st.just("tf32")},
        ),
        "validation": st.fixed_dictionaries({"request_ids": st.lists(st.text(), min_size=1)}),
    },
)


@st.composite
def recommenders(draw):
    listed = draw(st.lists(NAMES.map(lambda name: [name]) | RUNS, min_size=1, max_size=8))
    names = list(dict.fromkeys(["price", *(name for run in listed for name in run), "item"]))
    names = [name for name in names if name not in ("tags", "last")]
    cut = draw(st.integers(1, len(names) - 1))
    options = draw(st.dictionaries(st.sampled_from(names[:cut]), OPTIONS, max_size=3))
    features = Features(
        numeric=tuple(names[:cut]),
        categorical=tuple(names[cut:]),
        lists=("tags", "last"),
        numeric_options=options,
        list_options=draw(st.dictionaries(st.sampled_from(["tags", "last"]), LIST_OPTIONS)),
    )
    label, time = draw(st.lists(NAMES.filter(lambda name: name not in names), min_size=2, max_size=2, unique=True))
    data = draw(st.sampled_from([ColumnNames(), ColumnNames(label=label), ColumnNames(label=label, event_time=time)]))
    return Recommender(
        name=draw(st.from_regex(r"[a-z][a-z0-9_]{0,9}", fullmatch=True)),
        features=features,
        data=data,
        settings=draw(SETTINGS),
    )


@settings(deadline=None)
@given(recommenders())
def test_what_is_written_is_read_back(recommender):
    read = parse_recommender(format_recommender(recommender), source="it")
    assert read == recommender
    assert read.digest == recommender.digest
