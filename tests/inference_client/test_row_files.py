"""Tests that the reader of Parquet files returns the rows that were written to the files."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from demo.simulation.traffic import concatenated, read_rows, row_files
from evergreen.config.data import ColumnNames
from evergreen.config.features import CategoricalOptions, Features, category_of
from evergreen.config.spec import Recommender
from evergreen.contracts.criteo import CATEGORICAL, CRITEO_RECOMMENDER, DENSE
from evergreen.contracts.raw_rows import LABEL
from evergreen.runtime.errors import ContractError
from inference_client.rows import WrongValue, categories
from tests.support.errors import raises


def write(path, table):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    return path


def read(path, recommender=CRITEO_RECOMMENDER, labelled=True):
    batches = list(read_rows(row_files(path), recommender, labelled=labelled))
    features = concatenated([batch.features for batch in batches])
    return features.dense, features.categorical, np.concatenate([batch.label for batch in batches])


def raw(table):
    return table


def texts_in_another_order(table):
    """Return the rows with categories as text, in another column order and without the label."""
    texts = {
        name: [None if v is None else str(v) for v in table[name].to_pylist()]
        for name in CATEGORICAL
    }
    return pa.table(texts | {n: table[n] for n in DENSE})


@pytest.mark.parametrize("form", [raw, texts_in_another_order])
def test_every_form_gives_rows_that_were_written(tmp_path, criteo_table, form):
    table = criteo_table(150)
    labelled = form is raw
    dense, categorical, label = read(
        write(tmp_path / "rows.parquet", form(table)), labelled=labelled
    )
    for i, column in enumerate(DENSE):
        np.testing.assert_array_equal(dense[:, i], table[column].to_numpy().astype(np.float32))
    for i, column in enumerate(CATEGORICAL):
        np.testing.assert_array_equal(categorical[:, i], table[column].fill_null(-1).to_numpy())
    np.testing.assert_array_equal(label, table[LABEL].to_numpy() if labelled else np.zeros(150))
    assert (dense.dtype, categorical.dtype, label.dtype) == (np.float32, np.int64, np.int32)


@pytest.mark.parametrize("label", ["clicked", LABEL])
def test_own_columns_are_read_by_name_and_label_by_own_or_raw_name(tmp_path, label):
    features = Features(numeric=("price",), categorical=("Item", "item"))
    shop = Recommender(name="shop", features=features, data=ColumnNames(label="clicked"))
    table = pa.table(
        {
            "item": [5, None],
            label: [True, False],
            "seen": ["a", "b"],
            "Item": [7, 8],
            "price": [None, 2],
        }
    )
    dense, categorical, labels = read(write(tmp_path / "rows.parquet", table), shop)
    np.testing.assert_array_equal(dense, [[np.nan], [2.0]])
    assert (categorical.tolist(), labels.tolist()) == ([[7, 5], [8, -1]], [1, 0])


@pytest.mark.parametrize("held", [{}, {"place": [3, 4]}])
def test_column_served_as_one_value_may_be_absent_but_is_read_if_present(tmp_path, held):
    place = {"place": CategoricalOptions(served_as=1)}
    shop = Recommender(
        name="shop",
        features=Features(numeric=(), categorical=("place", "item"), categorical_options=place),
    )
    path = write(tmp_path / "rows.parquet", pa.table({"item": [5, 6], LABEL: [1, 0], **held}))
    expected = np.c_[held.get("place", [-1, -1]), [5, 6]]
    np.testing.assert_array_equal(read(path, shop)[1], expected)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.drop_columns(["C7", "I3"]), r"lacks columns \['I3', 'C7'\]"),
        (
            lambda t: t.rename_columns({"label": "lable"}),
            r"lacks columns \['label'\] of .* click_model, expected lable",
        ),
        (
            lambda t: t.set_column(0, "label", pa.array([2] * 5000)),
            "rows.parquet row 0: label is 2, expected 0 or 1",
        ),
        (lambda t: t.set_column(14, "C1", pa.array(["68"] * 4999 + ["g"])), "row 4999: C1 is 'g'"),
        (lambda t: t.set_column(14, "C1", pa.array([0, 1, 2.5, *[4] * 4997])), "row 2: C1 is 2.5"),
    ],
    ids=["columns", "no label", "label", "text", "hash"],
)
def test_errors_are_named_by_file_row_and_column(tmp_path, criteo_table, change, text):
    with pytest.raises(ContractError, match=text):
        read(write(tmp_path / "rows.parquet", change(criteo_table(5000))))


def test_corrupt_file_and_empty_folder_are_named(tmp_path):
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 and no more")
    with raises(ContractError, "rows.parquet", "read"):
        read(tmp_path / "rows.parquet")
    (tmp_path / "empty").mkdir()
    with raises(ContractError, "no Parquet file"):
        row_files(tmp_path / "empty")


def test_folder_is_read_in_order_of_its_names(tmp_path, criteo_table):
    for day in (2, 1):
        write(tmp_path / f"day={day}" / "part.parquet", criteo_table(5, seed=day))
    expected = np.concatenate([criteo_table(5, seed=day)["I1"].to_numpy() for day in (1, 2)])
    np.testing.assert_array_equal(read(tmp_path)[0][:, 0], expected)


@pytest.mark.parametrize(
    "text", ["0x1f", "68fd1e64", "1_0", " 1", "1 2", "1\n", "9" * 20, "\u0661"]
)
def test_text_that_resembles_number_is_no_category(text):
    for values in (
        [text],
        ["0123456789", text],
        ["1", None, text],
        ["1", 16, text],
        pa.array(["1", None, text]),
    ):
        with raises(WrongValue, "64 bits"):
            categories("C1", values)


@pytest.mark.parametrize("form", ["list", "objects", "arrow", "dictionary"])
def test_strings_and_integers_become_same_categories_as_in_files(form):
    words = ["red shoe", "7", "07", None, "-5", "red shoe"]
    numbers = [0, 2**52 - 1, 2**52, None, -(2**63), -1]
    for values, is_string in ((words, True), (numbers, False)):
        expected = [-1 if each is None else category_of(str(each)) for each in values]
        if form == "objects":
            values = np.array(values, object)
        elif form in ("arrow", "dictionary"):
            values = pa.array(values)
            values = values.dictionary_encode() if form == "dictionary" else values
        assert categories("item", values, is_string=is_string).tolist() == expected
