"""Tests of `recommender.yaml`: reading, writing, and the message of each kind of mistake."""

import re
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from evergreen.config.data import OWN_COLUMNS, ColumnNames
from evergreen.config.features import Features, ListOptions, NumericOptions
from evergreen.config.model import NetworkConfig
from evergreen.config.reader import read_mapping
from evergreen.config.sections import section_classes
from evergreen.config.spec import SECTIONS, Recommender
from evergreen.contracts.criteo import CRITEO_RECOMMENDER
from evergreen.recommender_file.form import (
    OPTIONS,
    compare,
    format_recommender,
    parse_recommender,
    read_recommender,
)
from evergreen.runtime.errors import ContractError
from testing.paths import REPOSITORY
from tests.support.errors import raises

MISTAKES = yaml.safe_load((Path(__file__).parent / "mistakes.yaml").read_text())
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


def test_file_contains_name_columns_and_settings():
    assert parse_recommender(SHOP, source="shop.yaml") == Recommender(
        name="shop",
        data=ColumnNames(label="clicked", event_time="ts"),
        features=Features(numeric=("price",), categorical=("item", "C1", "C2", "C3")),
        settings={"training": {"learning_rate": 0.001, "round_rates": [0.1, 1.5]}},
    )


@pytest.mark.parametrize(
    ("old", "new", "message"), [tuple(each.values()) for each in MISTAKES["file"]]
)
def test_mistake_is_named_by_file_line_path_value_and_what_was_expected(old, new, message):
    assert SHOP.count(old) == 1 or old == "shop"
    with pytest.raises(ContractError, match=f"^shop.yaml:{re.escape(message)}"):
        parse_recommender(SHOP.replace(old, new, 1), source="shop.yaml")


@pytest.mark.parametrize(
    ("column", "options", "message"), [tuple(each.values()) for each in MISTAKES["options"]]
)
def test_mistake_in_options_of_column_is_named_with_column(column, options, message):
    kind = "lists" if column == "tags" else "numeric"
    text = SHOP.replace("numeric: [price]", f"{kind}: {{{column}: {{{options}}}}}")
    with pytest.raises(
        ContractError, match=f"^shop.yaml:7: features.{kind}.{column}.{re.escape(message)}"
    ):
        parse_recommender(text, source="shop.yaml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty, expected a recommender"),
        (b"# nothing yet\n", "is empty, expected a recommender"),
        (b"just words", ":1: the file is 'just words', expected keys with values"),
        (b"\xff\xfe", "is not text in UTF-8"),
        (b"[" * 5000, ":1: is nested more than 20 deep"),
        (b"? " * 5000, ":1: is nested more than 20 deep"),
        (b"{a: " * 5000, ":1: is nested more than 20 deep"),
        (b"- " * 5000, ":1: is nested more than 20 deep"),
        (b"#" * 300_000, "has more than 262,144 bytes, expected a recommender"),
        (
            b"features: {numeric: [" + b"a, " * 60_000 + b"]}",
            ":1: has more than 50,000 keys and values",
        ),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_path_that_is_no_such_file_is_named(content, message, tmp_path):
    path = tmp_path / "shop.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ContractError, match=f"^{re.escape(str(path))}.*{re.escape(message)}"):
        read_recommender(path)


HEAD = "format: evergreen/recommender/1\nname: shop\nfeatures: "
BOMBS = {
    "ranges": "{categorical: [" + ", ".join(f"{c}1..{c}9999" for c in "abcdefghijklmn") + "]}",
    "ranges of lists": "{lists: {a1..a4000: {max: 4000}}}",
    "dots": "{numeric: [" + "1.." * 40_000 + "]}",
    "digits": "{numeric: [" + "1" * 100_000 + "]}",
    "digits of a float": "{numeric: [" + "1" * 100_000 + ".5]}",
    "aliases": "&a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]",
    "merges": "&a {x: y}\nb: {<<: *a}",
    "one long key": "{? " + "a" * 100_000 + " : 1}",
    "names": "{numeric: [" + ", ".join(f"c{n}x" for n in range(20_000)) + "]}",
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_hostile_small_files_take_little_time_and_each_gives_one_line(bomb):
    with pytest.raises(ContractError, match=r"^shop.yaml:\d+: ") as caught:
        parse_recommender(HEAD + bomb, source="shop.yaml")
    assert len(str(caught.value)) < 2100


def test_maximum_number_of_columns_is_read_in_time():
    text = (
        HEAD + "{numeric: [a1..a1365], categorical: [b1..b1365], lists: {c1..c136: {table: b1365}}}"
    )
    features = parse_recommender(text, source="shop.yaml").features
    assert len(features.columns["numeric"] + features.columns["categorical"]) == 4090


BOUNDLESS = {"seed": (1 << 63) - 1, "served_as": (1 << 63) - 1}
"""Maximum values of the settings that may be large, because memory does not depend on them."""


@pytest.mark.parametrize(
    "kind", [*OPTIONS.values(), *chain(*map(section_classes, SECTIONS))], ids=lambda k: k.__name__
)
def test_every_integer_setting_has_upper_bound(kind):
    """10^17 rows, columns, steps or processes are refused before anything is allocated."""
    hints = get_type_hints(kind)
    given = {"num_dense": 1, "num_categorical": 2} if issubclass(kind, NetworkConfig) else {}
    for each in fields(kind):
        if "int" in str(hints[each.name]) and each.name not in (*BOUNDLESS, "widths", *given):
            for value in (10**17, [10**17]):
                with pytest.raises(ContractError, match=rf"{each.name}|tower"):
                    read_mapping(kind, {**given, each.name: value}, path="section")


def test_file_without_any_feature_is_refused():
    with raises(ContractError, "shop.yaml:3", "features", "no column"):
        parse_recommender(
            "format: evergreen/recommender/1\nname: shop\nfeatures: {numeric: []}",
            source="shop.yaml",
        )


def test_words_older_yaml_converts_stay_strings_and_quoted_ranges_names():
    text = "format: evergreen/recommender/1\nname: shop\n"
    text += "features: {numeric: [on, no, 2026-11-23, 1:30, 010, 'a1..a3'], categorical: [yes]}"
    assert parse_recommender(text, source="it").features.numeric == (
        "on",
        "no",
        "2026-11-23",
        "1:30",
        "010",
        "a1..a3",
    )


def test_numbers_in_range_keep_their_leading_zeros():
    text = (
        "format: evergreen/recommender/1\nname: shop\nfeatures: {numeric: [price], categorical: "
        "[c08..c11]}"
    )
    assert parse_recommender(text, source="it").features.categorical == ("c08", "c09", "c10", "c11")


def test_example_describes_criteos_recommender():
    assert read_recommender(REPOSITORY / "examples/criteo/recommender.yaml") == CRITEO_RECOMMENDER


def test_criteos_columns_are_written_as_two_ranges():
    assert format_recommender(CRITEO_RECOMMENDER) == (
        "format: evergreen/recommender/1\nname: click_model\n"
        "features:\n  numeric: [I1..I13]\n  categorical: [C1..C26]\n"
    )


def test_columns_may_have_options_and_range_of_columns_same_options():
    options = (
        "  numeric: {price: {indicator: true, transform: [clip(-1.5..3e2), minmax]}, n1..n2: "
        "{fill: 2}, age: }\n"
    )
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
    written = "[price]", "{price: {fill: -0.0, transform: [clip(-0.0..+3e2), minmax]}}"
    other = "[price]", "{price: {transform: ['clip(0..300)', minmax]}}"
    usual = "[price]", "{price: {fill: 0, transform: [clip(0e1), log1p, standardize]}}"
    digests = [
        parse_recommender(SHOP.replace(*each), source="it").digest
        for each in (written, other, usual)
    ]
    assert digests[0] == digests[1]
    assert digests[2] == parse_recommender(SHOP, source="it").digest


NUMBERED = st.builds(
    lambda prefix, first: f"{prefix}{first}",
    st.sampled_from(["", "a", "1..", "a..b", "0"]),
    st.integers(0, 20),
)
NAMES = (
    st.text(min_size=1, max_size=200)
    | NUMBERED
    | st.sampled_from(["true", "null", "~", "1e7", "a: b", "x #y", "- x", "I1..I3"])
)
NAMES = NAMES.map(str.strip).filter(
    lambda name: name and name.isprintable() and "/" not in name and name not in OWN_COLUMNS
)
RUNS = st.builds(
    lambda prefix, first, width, length: [
        f"{prefix}{number:0{width}}" for number in range(first, first + length)
    ],
    st.sampled_from(["I", "x1y", "a..", "9"]),
    st.integers(0, 10**9),
    st.integers(0, 10),
    st.integers(1, 6),
)
OPTIONS = st.builds(
    NumericOptions,
    fill=st.floats(-1e9, 1e9),
    indicator=st.booleans(),
    transform=st.sampled_from(
        [("clip(0)", "log1p", "standardize"), (), ("clip(-2..1e3)", "minmax"), ("standardize",)]
    ),
) | st.builds(
    NumericOptions,
    transform=st.sampled_from([("quantile_buckets(9)",), ("clip(0)", "quantile_buckets(2)")]),
)
LIST_OPTIONS = st.builds(
    ListOptions, max=st.integers(1, 99), keep=st.sampled_from(["newest", "oldest"])
) | st.builds(ListOptions, pool=st.sampled_from(["mean", "sum"]), table=st.just("item"))
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "training": st.fixed_dictionaries(
            {"learning_rate": st.floats(1e-300, 1e300) | st.integers(1, 2**63 - 1)},
            optional={
                "round_rates": st.lists(st.floats(1e-9, 10.0), min_size=1),
                "precision": st.just("tf32"),
            },
        ),
        "extraction": st.fixed_dictionaries({"columns": st.lists(st.text(), min_size=1)}),
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
    label, time = draw(
        st.lists(NAMES.filter(lambda name: name not in names), min_size=2, max_size=2, unique=True)
    )
    data = draw(
        st.sampled_from(
            [ColumnNames(), ColumnNames(label=label), ColumnNames(label=label, event_time=time)]
        )
    )
    return Recommender(
        name=draw(st.from_regex(r"[a-z][a-z0-9_]{0,9}", fullmatch=True)),
        features=features,
        data=data,
        settings=draw(SETTINGS),
    )


@settings(deadline=None)
@given(recommenders())
def test_written_data_is_read_back(recommender):
    read = parse_recommender(format_recommender(recommender), source="it")
    assert read == recommender
    assert read.digest == recommender.digest
