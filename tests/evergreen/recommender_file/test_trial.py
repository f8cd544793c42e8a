"""Tests of `evergreen data check FILE --data ROWS`."""

import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cli.recommender import main
from evergreen.config.data import ColumnNames
from evergreen.config.features import CategoricalOptions, Features, ListOptions
from evergreen.config.spec import Recommender
from evergreen.recommender_file.columns import Coder, deciding_auc
from evergreen.recommender_file.form import format_recommender
from evergreen.recommender_file.trial import sentences, try_rows
from evergreen.runtime.errors import ContractError

NOW = datetime.datetime(2026, 8, 1, tzinfo=datetime.timezone.utc).timestamp()
SHOP = Recommender(
    name="shop",
    data=ColumnNames(label="click", event_time="ts", user="user", item="item"),
    features=Features(
        numeric=("price",),
        categorical=("user", "item"),
        categorical_options={"item": CategoricalOptions(type="string")},
        lists=("tags",),
        list_options={"tags": ListOptions(type="string")},
    ),
)
HEADER = "click,ts,user,item,price,tags"


def row(n, **others):
    """Return row `n` of a log, with some values replaced. The log has four days of 50 rows."""
    usual = {
        "click": int(n % 5 == 0),
        "ts": f"2026-05-{n // 50 + 1:02}T08:00:{n % 50:02}Z",
        "user": n % 20,
        "item": f"i{n % 8}",
        "price": n / 8,
        "tags": "a|b",
    }
    return ",".join(map(str, (usual | others).values()))


def rows(**others):
    """Return 200 CSV rows. If a keyword `n7` is given, its value replaces row 7."""
    return [others.get(f"n{n}", row(n)) for n in range(200)]


@pytest.fixture
def write(tmp_path):
    def write(lines, header=HEADER, name="clicks.csv"):
        path = tmp_path / name
        path.write_text("\n".join([header, *lines]) + "\n")
        return path

    return write


def text_of(trial):
    return "\n".join(sentences(trial))


def test_all_lines_are_counted_and_content_of_rows_is_reported(write):
    lines = [*rows(n3=row(3, price="oops")), "", HEADER, "1,2"]
    trial = try_rows(write(lines), SHOP, now=NOW)
    assert (trial.rows, trial.malformed, trial.clicks) == (199, 2, 40)
    assert trial.span == (
        1_777_622_400_000_000,
        1_777_622_400_000_000 + 3 * 86_400_000_000 + 49_000_000,
    )
    assert [trial.days[20_574 + n] for n in range(4)] == [49, 50, 50, 50]
    assert (trial.users, trial.items) == (20, 8)
    text = text_of(trial)
    assert "204 lines = 199 rows + 2 rejected + 1 blank + 2 header" in text
    assert "clicks.csv, line 5: price is 'oops', expected a finite number" in text
    assert "clicks.csv, line 204: 2 columns, expected 6" in text
    assert "20.10% clicks (40)" in text
    assert "2026-05-01 to 2026-05-04, 4 days with rows, 50 rows a day" in text
    assert "tags: 1 list, the same in all rows" in text
    assert "  times are read as iso" in text
    assert not trial.is_refused


@pytest.mark.parametrize(
    ("lines", "header", "refusal"),
    [
        (
            rows(n1=row(1, price="x"), n2=row(2, price="x"), n3=row(3, price="x")),
            HEADER,
            "3 of 200 rows are malformed",
        ),
        (
            rows(),
            HEADER.replace("click", "clicked"),
            "expected also 'click', which is the label of recommender shop",
        ),
        (rows(), HEADER.replace("price", "prize"), r"lacks the columns \['price'\]"),
        ([], HEADER, "holds no row"),
        (
            [f"0,{n},1,i,2,a" for n in range(9)],
            HEADER,
            "ts is .* not a time between 1990 and tomorrow",
        ),
    ],
)
def test_data_that_ingest_would_refuse_is_refused(lines, header, refusal, write):
    trial = try_rows(write(lines, header), SHOP, now=NOW)
    assert trial.is_refused
    with pytest.raises(ContractError, match=refusal):
        raise ContractError(text_of(trial).partition("ingest would refuse: ")[2])


def test_column_that_determines_label_is_leak_and_other_columns_are_not(write):
    trial = try_rows(
        write(rows(**{f"n{n}": row(n, price=(n % 5 == 0) * 3 + n % 2) for n in range(200)})),
        SHOP,
        now=NOW,
    )
    assert {each.name: each.is_leak for each in trial.features} == dict(
        price=True, user=True, item=False, tags=False
    )
    assert (
        "WARNING: alone determines the label, so was it known before the click? price (AUC 1.000)"
        in text_of(trial)
    )


def test_categories_of_newest_rows_that_no_earlier_row_has_are_counted(write):
    # A missing value among the newest rows does not count as a new category.
    newest = {f"n{n}": row(n, item=f"new{n}" if n % 2 else "NULL") for n in range(180, 200)}
    (item,) = (
        each
        for each in try_rows(write(rows(**newest)), SHOP, now=NOW).features
        if each.name == "item"
    )
    assert item.new_share == pytest.approx(10 / 20)
    backwards = try_rows(write(rows(**newest)[::-1]), SHOP, now=NOW)
    assert next(
        each.new_share for each in backwards.features if each.name == "item"
    ) == pytest.approx(10 / 20)


@pytest.mark.parametrize(("num_other", "is_refused"), [(2, False), (3, True)])
def test_rows_that_repeat_key_are_counted_and_many_differing_are_refused(
    num_other, is_refused, write
):
    keyed = [f"r{n // 2},{n % 2},{row(n)}" for n in range(200)]
    again = [f"r{n},0,{row(2 * n, click=1)}" for n in range(20)]
    other = [f"r{n},1,{row(2 * n + 1, item='zzz')}" for n in range(num_other)]
    trial = try_rows(write([*keyed, *again, *other], f"request_id,row,{HEADER}"), SHOP, now=NOW)
    assert trial.copies == (20 + num_other, num_other)
    assert trial.is_refused == is_refused
    assert (
        f"{20 + num_other} rows with the key of another one, {num_other} of them with other "
        "features" in text_of(trial)
    )


def test_equal_rows_are_counted(write):
    assert try_rows(write([*rows(), *rows()[:7]]), SHOP, now=NOW).equal_rows == 7


def test_rows_without_times_name_what_ingest_needs(write):
    recommender = Recommender(
        name="a",
        data=ColumnNames(label="click"),
        features=Features(numeric=("price",), categorical=()),
    )
    trial = try_rows(write([f"{n % 2},{n}" for n in range(9)], "click,price"), recommender, now=NOW)
    assert (trial.is_refused, trial.span) == (False, None)
    assert "no times: `evergreen data ingest` needs --last-day and --days" in text_of(trial)


def test_folder_is_tried_file_by_file_and_other_files_are_named(write, tmp_path):
    write(rows()[:100], name="a.csv")
    write(["x"], name="notes.pdf")
    lines = [line.split(",") for line in rows()[100:]]
    columns = {name: list(values) for name, values in zip(HEADER.split(","), zip(*lines))}
    pq.write_table(pa.table(columns), tmp_path / "b.parquet")
    trial = try_rows(tmp_path, SHOP, now=NOW)
    assert (trial.rows, [file.counts.rows for file in trial.files]) == (200, [100, 100])
    assert "skipped files that are not click logs: notes.pdf" in text_of(trial)


def test_only_first_rows_are_read_and_all_are_counted(write):
    trial = try_rows(write(rows()), SHOP, now=NOW, sample_rows=30)
    assert (trial.rows, trial.num_sampled, trial.clicks) == (200, 30, 40)
    assert "by the first 30 rows:" in text_of(trial)


def test_command_ends_with_1_where_ingest_would_refuse(write, tmp_path, capsys):
    file = tmp_path / "shop.yaml"
    file.write_text(format_recommender(SHOP))
    assert main(["check", str(file), "--data", str(write(rows()))]) == 0
    assert "200 rows kept, 0 malformed" in capsys.readouterr().out
    assert main(["check", str(file), "--data", str(write(rows()[:1] * 3 + ["1"]))]) == 1
    assert "ingest would refuse: " in capsys.readouterr().out
    assert main(["check", str(file), "--data", str(tmp_path / "absent.csv")]) == 2


def test_auc_of_column_is_that_of_all_pairs():
    generator = np.random.default_rng(3)
    labels = generator.integers(0, 2, 300).astype(np.int8)
    numbers = np.round(labels * 0.8 + generator.normal(size=300), 1)
    pairs = numbers[labels == 1][:, None] - numbers[labels == 0][None, :]
    expected = float((pairs > 0).mean() + (pairs == 0).mean() / 2)
    for sign in (1, -1):
        coder = Coder()
        coder.add(pa.array(sign * numbers))
        assert deciding_auc(coder.column("x"), labels) == pytest.approx(expected, abs=1e-12)
    assert deciding_auc(coder.column("x"), np.where(np.arange(300) < 20, labels, -1)) is None
