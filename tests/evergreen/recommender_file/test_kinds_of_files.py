"""Tests of `recommender.yaml` drafts from common kinds of files, each with its expected result."""

import datetime
import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evergreen.config.features import CategoricalOptions, ListOptions
from evergreen.recommender_file.draft import draft, guess_roles, read_sample
from evergreen.recommender_file.form import parse_recommender
from evergreen.recommender_file.guesses import LEFT_OUT
from evergreen.runtime.errors import ContractError
from tests.support.errors import raises

BEGIN = datetime.datetime(2026, 5, 3, 6, tzinfo=datetime.timezone.utc)
NOW = datetime.datetime(2026, 8, 1, tzinfo=datetime.timezone.utc).timestamp()
STRING = CategoricalOptions(type="string")
N = 240


def clicks(**columns):
    """Return rows of synthetic clicks.

    The values of each column depend on the row's number and on random numbers.
    """
    generator = np.random.default_rng(11)
    rows = [
        {
            "n": n,
            "user": int(generator.integers(40)),
            "item": int(generator.integers(25)),
            "click": int(generator.random() < 0.3),
            "price": round(float(generator.random()) * 80, 2),
            "time": BEGIN + datetime.timedelta(minutes=20 * n),
        }
        for n in range(N)
    ]
    return {name: [of(row) for row in rows] for name, of in columns.items()}


USERS = {
    "user_id": lambda row: row["user"],
    "item_id": lambda row: row["item"],
    "click": lambda row: row["click"],
}


@pytest.fixture
def write(tmp_path):
    def write(columns, *, delimiter=",", name="clicks.csv"):
        path = tmp_path / name
        lines = [
            delimiter.join(columns),
            *(delimiter.join(map(str, row)) for row in zip(*columns.values())),
        ]
        path.write_text("\n".join(lines) + "\n")
        return path

    return write


def drafted(path):
    text = draft(read_sample(path), name="shop", now=NOW)
    return text, parse_recommender(text, source="draft")


def line_of(text, name):
    return next(line for line in text.splitlines() if line.lstrip("# ").startswith(f"{name}:"))


def question_of(path, key):
    """Return the draft's question about a key.

    `check` rejects a draft as long as it contains questions.
    """
    text = draft(read_sample(path), name="shop", now=NOW)
    with raises(ContractError, f"data.{key}", "FILL IN"):
        parse_recommender(text, source="draft")
    return line_of(text, key)


# -- times


@pytest.mark.parametrize(
    ("form", "written"),
    [
        ("seconds", lambda time: int(time.timestamp())),
        ("milliseconds", lambda time: int(time.timestamp()) * 10**3 + 500),
        ("microseconds", lambda time: int(time.timestamp()) * 10**6 + 7),
        ("nanoseconds", lambda time: int(time.timestamp()) * 10**9),
        ("seconds", lambda time: f"{int(time.timestamp())}.25"),
        ("YYYYMMDD", lambda time: f"{time:%Y%m%d}"),
        ("YYMMDDhh", lambda time: f"{time:%y%m%d%H}"),
        ("YYYYMMDDhh", lambda time: f"{time:%Y%m%d%H}"),
        ("YYMMDDhhmm", lambda time: f"{time:%y%m%d%H%M}"),
        ("YYYYMMDDhhmmss", lambda time: f"{time:%Y%m%d%H%M%S}"),
        (None, lambda time: f"{time:%Y-%m-%d %H:%M:%S.%f} UTC"),
        (None, lambda time: f"{time:%Y-%m-%d}"),
    ],
)
def test_times_are_recognized_and_resulting_days_are_shown(form, written, write):
    path = write(clicks(**USERS, timestamp=lambda row: written(row["time"])))
    text, recommender = drafted(path)
    assert (recommender.data.event_time, recommender.data.time_format) == ("timestamp", form)
    # 240 rows, 20 minutes apart, from 6:00 on the 3rd to 13:40 on the 6th
    assert "2026-05-03 to 2026-05-06, 60 rows a day" in line_of(text, "event_time")


def test_times_before_2000_are_reported_clearly(write):
    text, recommender = drafted(
        write(clicks(**USERS, ts=lambda row: 860_000_000 + 86_400 * row["n"]))
    )
    assert recommender.data.time_format == "seconds"
    assert "1997-04-02 to 1997-11-27, 1 row a day; BEFORE 2000: is this correct?" in line_of(
        text, "event_time"
    )


@pytest.mark.parametrize(
    ("name", "written", "question"),
    [
        (
            "timestamp",
            lambda row: 60 * row["n"],
            "as seconds since 1970: 1970-01-01, 240 rows a day",
        ),
        ("event_time", lambda row: 60 * row["n"], "Or rename the column and delete this line"),
        ("ts", lambda row: 2_050_000_000 + row["n"], "as seconds since 1970: 2034-12-17"),
        ("date", lambda row: f"{row['time']:%d.%m.%Y}", "its values are not times in a known form"),
    ],
)
def test_column_named_like_times_without_times_leads_to_question(name, written, question, write):
    assert question in question_of(write(clicks(**USERS, **{name: written})), "event_time")


@pytest.mark.parametrize(
    "form",
    ["%d.%m.%Y %H:%M:%S", "%d.%m.%y", "%m/%d/%Y %H:%M", "%d %b %Y", "%a, %d %b %Y %H:%M:%S GMT"],
)
def test_dates_in_unsupported_format_are_named_and_lead_to_question(form, write):
    path = write(
        clicks(**USERS, gesehen=lambda row: f"{row['time']:{form}}"), delimiter="\t", name="c.tsv"
    )
    assert "'gesehen' looks like a time in an unsupported form" in question_of(path, "event_time")
    text = draft(read_sample(path), name="shop", now=NOW)
    assert f"unsupported form, such as {BEGIN:{form}}" in line_of(text, "gesehen").replace(
        "It ", ""
    )


def test_birthdays_in_unsupported_form_do_not_replace_event_time(write):
    columns = clicks(
        **USERS, born=lambda row: f"{row['time']:%d.%m.%Y}", ts=lambda row: row["time"].isoformat()
    )
    assert drafted(write(columns))[1].data.event_time == "ts"


def test_times_of_two_formats_lead_to_question_with_days_of_each(write):
    question = question_of(write(clicks(**USERS, time=lambda row: 1_405_030_600)), "time_format")
    # 1405030600 is 2014-05-03 06:00 in the format YYMMDDhhmm. As a Unix time, it is in July 2014.
    assert "one of YYMMDDhhmm, seconds" in question
    assert (
        "YYMMDDhhmm (2014-05-03, 240 rows a day) or as seconds (2014-07-10, 240 rows a day)"
        in question
    )


def test_birthdays_are_not_event_times_and_are_excluded(tmp_path):
    columns = clicks(**USERS, born=lambda row: datetime.date(1950 + row["user"] % 30, 5, 7))
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    text, recommender = drafted(tmp_path / "a.parquet")
    assert recommender.data.event_time == "event_time"
    assert "rows have no time between 1990 and tomorrow" in line_of(text, "born")


def test_hours_of_day_are_no_times(write):
    _, recommender = drafted(write(clicks(**USERS, hour=lambda row: row["time"].hour)))
    assert recommender.data.event_time == "event_time"
    assert "hour" in recommender.features.categorical


def test_single_time_column_is_drafted_and_two_lead_to_question(write):
    times = {
        name: lambda row: f"{row['time']:%Y-%m-%dT%H:%M:%SZ}"
        for name in ("begin", "end", "updated_at")
    }
    text, recommender = drafted(write(clicks(**USERS, **times, created_at=times["end"])))
    assert recommender.data.event_time == "created_at"
    assert "Times (2026-05-03 to 2026-05-06, 60 rows a day) beside the row's own" in line_of(
        text, "updated_at"
    )
    assert "which of 'begin', 'end', 'updated_at'" in question_of(
        write(clicks(**USERS, **times)), "event_time"
    )


def test_rows_without_times_are_each_request_and_ingest_needs_days(write):
    text, recommender = drafted(write(clicks(**USERS)))
    assert (recommender.data.event_time, recommender.data.request_id) == (
        "event_time",
        "request_id",
    )
    assert "`evergreen data ingest` needs --last-day and --days" in line_of(text, "event_time")
    assert "each row is its own request" in line_of(text, "request_id")


# -- keys and entities


@pytest.mark.parametrize(
    ("name", "place", "expected"),
    [
        ("search_id", lambda row: row["n"] % 4, ("search_id", "slot")),
        ("session_id", lambda row: row["n"] % 4, ("session_id", "slot")),
        ("session_id", lambda row: row["n"] % 2, ("request_id", "row")),
        ("search_id", lambda row: row["n"] % 2, ("search_id", "row")),
    ],
)
def test_key_is_proposed_only_if_it_differs_in_each_row(name, place, expected, write):
    path = write(clicks(**{name: lambda row: f"s{row['n'] // 4}", "slot": place}, **USERS))
    _, recommender = drafted(path)
    assert (recommender.data.request_id, recommender.data.row) == expected
    assert ("slot" in recommender.features.categorical) == (expected[1] == "row")
    assert name not in recommender.features.names


def test_rows_written_again_with_their_click_keep_their_key(write):
    columns = clicks(request_id=lambda row: f"q{row['n']}", row=lambda row: 0, **USERS)
    again = {name: values + values[:30] for name, values in columns.items()}
    again["click"] = [0] * 30 + columns["click"][30:] + [1] * 30
    text, recommender = drafted(write(again))
    assert (recommender.data.request_id, recommender.data.row) == ("request_id", "row")
    assert "30 rows repeat a key: the last one is used" in line_of(text, "request_id")


@pytest.mark.parametrize(("num_other", "is_key"), [(2, True), (3, False)])
def test_few_rows_with_other_content_keep_key_and_over_one_percent_drop_it(
    num_other, is_key, write
):
    columns = clicks(search_id=lambda row: f"q{row['n']}", slot=lambda row: 0, **USERS)
    for n in range(num_other):  # the file has 240 rows
        columns["search_id"][n], columns["item_id"][n], columns["item_id"][n + 100] = (
            f"q{n + 100}",
            1,
            2,
        )
    assert drafted(write(columns))[1].data.row == ("slot" if is_key else "row")


def test_columns_named_like_keys_without_keys_lead_to_question(write):
    columns = clicks(
        request_id=lambda row: f"q{row['n'] // 8}", row=lambda row: row["n"] % 4, **USERS
    )
    assert "'row' is not a key: rows with other content repeat it" in question_of(
        write(columns), "row"
    )


def test_own_request_ids_are_preserved_without_rows(write):
    text, recommender = drafted(
        write(clicks(impression_id=lambda row: f"r{row['n'] // 3:03}", **USERS))
    )
    assert (recommender.data.request_id, recommender.data.row) == ("impression_id", "row")
    assert "up to 3 rows each" in line_of(text, "request_id")


@pytest.mark.parametrize(
    ("user", "item"),
    [
        ("userid", "itemID"),
        ("customer", "sku"),
        ("visitorId", "product_id"),
        ("user_pseudo_id", "adgroup_id"),
        ("member_no", "movieId"),
        ("uid", "article"),
    ],
)
def test_users_and_items_are_found_whatever_their_spelling(user, item, write):
    _, recommender = drafted(write(clicks(**dict(zip((user, item, "click"), USERS.values())))))
    assert (recommender.data.user, recommender.data.item) == (user, item)
    assert recommender.features.categorical == (user, item)


def test_column_with_few_users_or_mostly_unknown_user_is_no_user_column(write):
    few = clicks(
        user=lambda row: row["user"] % 3,
        item_id=lambda row: row["item"],
        click=lambda row: row["click"],
    )
    assert drafted(write(few))[1].data.user is None
    unknown = {**few, "user": [0 if n % 3 else n for n in range(N)]}
    assert drafted(write(unknown))[1].data.user is None


@pytest.mark.parametrize("name", ["", "Unnamed: 0", "id", "Nr"])
def test_column_that_numbers_rows_is_excluded_with_sentence(name, write):
    text, recommender = drafted(write({name: range(N), **clicks(**USERS)}))
    assert recommender.features.names == ("user_id", "item_id")
    reason = "it has no name" if not name else "It identifies the rows: it differs in each"
    assert reason in line_of(text, name or "column 1")


# -- the label


@pytest.mark.parametrize(
    "name", ["clk", "is_click", "Clicked", "label", "target", "purchase", "is_like"]
)
def test_names_of_clicks_and_conversions_are_known(name, write):
    columns = clicks(is_mobile=lambda row: row["n"] % 2, **USERS)
    columns[name] = columns.pop("click")
    assert drafted(write(columns))[1].data.label == name


@pytest.mark.parametrize(
    ("values", "question"),
    [
        ({0: "yes", 1: "no"}, "has the values .*(yes|no).*: write 0 and 1"),
        ({0: "-1", 1: "1"}, "has the values -?1, -?1: write 0 and 1"),
        ({0: "", 1: "1"}, "holds 1 or nothing: write 0 in the rows without a click"),
    ],
)
def test_column_named_like_label_with_other_values_leads_to_question(values, question, write):
    path = write(clicks(**{**USERS, "click": lambda row: values[row["click"]]}))
    assert re.search(question, question_of(path, "label"))


def test_two_values_of_unnamed_label_lead_to_question(write):
    columns = clicks(**USERS)
    columns["geklickt"] = ["ja" if click else "nein" for click in columns.pop("click")]
    question = question_of(write(columns), "label")
    assert re.search(r"'geklickt' \((ja and nein|nein and ja)\) says whether", question)
    assert "write 0 and 1" in question


def test_click_precedes_events_that_may_follow_it(write):
    columns = clicks(booking_bool=lambda row: row["click"] * (row["n"] % 2), **USERS)
    columns["click_bool"] = columns.pop("click")
    text, recommender = drafted(write(columns))
    assert recommender.data.label == "click_bool"
    assert "Another outcome beside 'click_bool'" in line_of(text, "booking_bool")


def test_label_with_missing_or_unexpected_values_is_drafted(write):
    columns = clicks(**USERS)
    columns["click"][7], columns["click"][N - 1] = "", "Total"
    text, recommender = drafted(write(columns))
    assert recommender.data.label == "click"
    assert "2 rows with another value or none: malformed" in line_of(text, "label")
    columns["click"][:12] = [""] * 12
    text, recommender = drafted(write(columns))
    assert (
        "13 rows with another value or none: malformed, more than the 1% that is tolerated"
        in line_of(text, "label")
    )


def test_two_likely_labels_lead_to_question_and_equal_labels_do_not(write):
    columns = clicks(**USERS, target=lambda row: row["n"] % 2)
    assert "which of 'click', 'target' is to be predicted" in question_of(write(columns), "label")
    columns["target"] = columns["click"]
    text, recommender = drafted(write(columns))
    assert recommender.data.label == "click"
    assert "It is the same as 'click'" in line_of(text, "target")


@pytest.mark.parametrize("name", ["nonclk", "no_click", "skipped"])
def test_complement_of_label_is_excluded(name, write):
    text, recommender = drafted(write(clicks(**{name: lambda row: 1 - row["click"]}, **USERS)))
    assert recommender.data.label == "click"
    assert name not in recommender.features.names
    assert "It is 1 where 'click' is 0: the label's complement" in line_of(text, name)


def test_other_outcomes_of_label_are_excluded(write):
    outcomes = {
        "purchase": lambda row: row["click"] * (row["n"] % 2),
        "conversion_id": lambda row: row["n"] % 5,
        "dwell_ms": lambda row: row["n"] * 7 % 90,
        "watch_time": lambda row: row["n"] * 5 % 80,
        "revenue": lambda row: row["price"],
    }
    text, recommender = drafted(
        write(clicks(**outcomes, **USERS, duration=lambda row: row["n"] * 3 % 70))
    )
    assert recommender.features.names == ("duration", "user_id", "item_id")
    left_out = text.partition("# Left out:")[2]
    for name in outcomes:
        assert line_of(left_out, name).endswith(
            ("not known when it is predicted", "only after the row was shown")
        )


@pytest.mark.parametrize(
    "leak",
    [
        lambda row: 4 + row["n"] % 2 if row["click"] else 1 + row["n"] % 3,
        lambda row: -row["n"] - 1 if row["click"] else row["n"],
        lambda row: f"page{row['n'] % 9}" if row["click"] else f"none{row['n'] % 5}",
        lambda row: row["price"] if row["click"] else "",
        lambda row: (
            (row["n"] % 10) + (50 if row["n"] % 2 else 0) if row["click"] else 20 + row["n"] % 10
        ),
    ],
    ids=["rating", "below zero", "words", "there or not", "in the middle"],
)
def test_column_that_determines_label_is_excluded_and_its_auc_is_named(leak, write):
    text, recommender = drafted(write(clicks(**USERS, rating=leak)))
    assert recommender.features.names == ("user_id", "item_id")
    line = line_of(text, "rating")
    assert "It alone determines the label (AUC 1.000)" in line or "(AUC 0.99" in line


def test_id_that_differs_in_each_row_does_not_determine_label(write):
    path = write(
        clicks(
            **USERS,
            coupon=lambda row: row["n"] * 7919 % 100_003,
            strong=lambda row: row["click"] + row["n"] % 3,
        )
    )
    assert {"coupon", "strong"} <= set(drafted(path)[1].features.names)


# -- types


def test_ids_of_64_bits_and_with_zeros_before_them_are_exact_categories(write, tmp_path):
    ids = {
        "user": lambda row: 2**63 + row["user"],
        "item": lambda row: f"{row['item'] * 15_485_863:08x}",
        "shop": lambda row: f"{row['item']:04}" if row["n"] % 2 else str(row["item"]),
        "c7": lambda row: 10**12 + row["user"],
    }
    columns = clicks(**ids, click=USERS["click"])
    text, recommender = drafted(write(columns))
    assert recommender.features.categorical == ("user", "item", "shop", "c7")
    assert recommender.features.categorical_options == {"item": STRING, "shop": STRING}
    assert f"{min(columns['user'])} to {max(columns['user'])}. Whole" in text
    assert "so they are kept as texts" in text
    unsigned = {"user": pa.array(columns["user"], pa.uint64()), "click": columns["click"]}
    pq.write_table(pa.table(unsigned), tmp_path / "a.parquet")
    assert drafted(tmp_path / "a.parquet")[1].features.categorical == ("user",)


def test_ids_of_more_than_64_bits_are_stored_as_texts(write):
    path = write(clicks(**USERS, owner=lambda row: 10**24 + row["user"]))
    _, recommender = drafted(path)
    assert recommender.features.categorical == ("user_id", "item_id", "owner")
    assert recommender.features.categorical_options == {"owner": STRING}


def test_ids_as_floats_beyond_2_to_53rd_are_excluded_with_sentence(write, tmp_path):
    path = write(
        clicks(
            **USERS,
            member=lambda row: f"{2**53 + 2 * row['user']}.0",
            key=lambda row: f"{row['user'] + 1}e17",
        )
    )
    text, recommender = drafted(path)
    assert recommender.features.names == ("user_id", "item_id")
    assert "which are ambiguous whole numbers; write ids as whole numbers or texts" in line_of(
        text, "member"
    )
    columns = clicks(**USERS, member=lambda row: float(2**60 + 4096 * row["user"]))
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert "member" not in drafted(tmp_path / "a.parquet")[1].features.names


@pytest.mark.parametrize("word", ["NULL", "None", r"\N", "NA", "N/A", "-", "?", "#N/A", "", "nan"])
def test_word_for_missing_value_changes_no_type_and_is_named(word, write):
    path = write(clicks(**USERS, price=lambda row: word if row["n"] % 8 == 1 else row["price"]))
    text, recommender = drafted(path)
    assert recommender.features.numeric == ("price",)
    assert "12.5% missing" + (f" ({word})" if word else "") in text


def test_up_to_one_percent_unexpected_values_are_malformed(write):
    path = write(clicks(**USERS, price=lambda row: "n.v." if row["n"] in (3, 99) else row["price"]))
    text, recommender = drafted(path)
    assert recommender.features.numeric == ("price",)
    assert "2 rows with another value, such as 'n.v.': malformed" in text
    text, recommender = drafted(
        write(clicks(**USERS, price=lambda row: row["price"] if row["n"] % 6 else "n.v."))
    )
    assert "price" not in recommender.features.names
    assert "Numbers, but 'n.v.' in 40 rows" in line_of(text, "price")


def test_booleans_are_words_in_any_spelling(write, tmp_path):
    path = write(
        clicks(
            click=lambda row: str(bool(row["click"])),
            is_new=lambda row: str(row["n"] % 3 == 0).upper(),
            shop=USERS["item_id"],
        )
    )
    _, recommender = drafted(path)
    assert recommender.data.label == "click"
    assert recommender.features.categorical_options == {"is_new": STRING}


def test_recbole_suffixes_give_type(write):
    columns = {
        "user_id:token": lambda row: row["user"],
        "code:token": lambda row: f"{row['item']}.5",
        "age:float": lambda row: row["n"] % 9,
        "tags:token_seq": lambda row: "red blue" if row["n"] % 2 else "green",
        "w:float_seq": lambda row: "0.5 1.5",
        "timestamp:float": lambda row: f"{int(row['time'].timestamp())}.0",
        "label:float": lambda row: f"{row['click']}.0",
    }
    _, recommender = drafted(write(clicks(**columns), delimiter="\t"))
    data, features = recommender.data, recommender.features
    assert (data.label, data.event_time, data.time_format) == (
        "label:float",
        "timestamp:float",
        "seconds",
    )
    assert (data.user, features.numeric, features.categorical) == (
        "user_id:token",
        ("age:float",),
        ("user_id:token", "code:token"),
    )
    assert features.list_options == {
        "tags:token_seq": ListOptions(type="string", max=2, separator=" ")
    }


@pytest.mark.parametrize("separator", ["|", ",", ";", " "])
def test_lists_are_found_with_their_separator(separator, write):
    genres = ("drama", "war", "noir", "western")
    path = write(
        clicks(
            **USERS, genres=lambda row: separator.join(genres[i] for i in range(row["n"] % 4 + 1))
        ),
        delimiter="\t",
    )
    _, recommender = drafted(path)
    assert recommender.features.list_options == {
        "genres": ListOptions(type="string", max=4, separator=separator)
    }


@pytest.mark.parametrize(
    "written", [json.dumps, str, lambda found: json.dumps(found).replace(", ", ",")]
)
def test_lists_in_brackets_need_no_separator(written, write):
    path = write(
        clicks(**USERS, seen=lambda row: written([row["item"], row["n"] % 7])), delimiter="\t"
    )
    _, recommender = drafted(path)
    assert recommender.features.list_options == {"seen": ListOptions(max=2)}


def test_titles_are_no_lists_and_numbers_with_comma_are_no_lists_either(write):
    columns = clicks(
        **USERS,
        title=lambda row: f"Shoe {row['item']}, red and nice",
        place=lambda row: f"North {row['item']}, hall",
        preis=lambda row: f"{row['price']:.2f}".replace(".", ","),
    )
    text, recommender = drafted(write(columns, delimiter=";"))
    assert recommender.features.lists == ()
    assert recommender.features.categorical == ("user_id", "item_id", "title", "place")
    assert (
        "some have ',' inside: if they are lists, name it under lists with {separator: ','}" in text
    )
    assert "Numbers with a comma: write 3.5" in line_of(text, "preis")


# -- file formats


@pytest.mark.parametrize(
    "content",
    [
        lambda text: text.replace(",", ";").encode(),
        lambda text: text.replace(",", "|").encode(),
        lambda text: text.replace("\n", "\r").encode(),
        lambda text: text.encode("utf-16"),
        lambda text: ("# exported\n" + text).encode(),
        lambda text: text.replace("\n", ",\n").replace(",\n", "\n", 1).encode(),
        lambda text: text.replace("\n", "\r\n").encode(),
    ],
    ids=["semicolons", "bars", "carriage returns", "utf-16", "comment", "trailing", "crlf"],
)
def test_forms_that_ingest_reads_are_drafted(content, tmp_path, write):
    columns = clicks(**USERS, price=lambda row: row["price"])
    path = tmp_path / "form.csv"
    path.write_bytes(content(write(columns).read_text()))
    text, recommender = drafted(path)
    assert f"all {N} rows" in text
    assert recommender.features.names == ("price", "user_id", "item_id")


def test_json_lines_are_drafted(tmp_path):
    columns = clicks(
        **USERS,
        price=lambda row: row["price"] if row["n"] % 5 else None,
        tags=lambda row: ["a", str(row["item"])],
    )
    path = tmp_path / "clicks.jsonl"
    path.write_text(
        "".join(json.dumps(dict(zip(columns, row))) + "\n" for row in zip(*columns.values()))
    )
    _, recommender = drafted(path)
    assert recommender.features.names == ("price", "user_id", "item_id", "tags")
    assert recommender.features.list_options == {"tags": ListOptions(type="string", max=2)}


def test_parquet_nanosecond_times_are_read_and_sentinels_are_malformed(tmp_path):
    columns = clicks(**USERS)
    times = np.array(
        [np.datetime64(BEGIN.replace(tzinfo=None)) + np.timedelta64(20 * n, "m") for n in range(N)]
    ).astype("datetime64[ns]")
    times += np.timedelta64(7, "ns")
    times[5] = np.datetime64("2261-01-01")
    pq.write_table(pa.table({**columns, "ts": pa.array(times)}), tmp_path / "a.parquet")
    text, recommender = drafted(tmp_path / "a.parquet")
    assert recommender.data.event_time == "ts"
    assert (
        "2026-05-03 to 2026-05-06, 60 rows a day; 1 row with no time from 1990 to tomorrow"
        in line_of(text, "event_time")
    )


def test_parquet_times_of_unexpected_unit_lead_to_question(tmp_path):
    columns = clicks(**USERS)
    seconds = [int(row.timestamp()) for row in clicks(t=lambda row: row["time"])["t"]]
    columns["ts"] = pa.array(seconds, pa.int64()).cast(pa.timestamp("ms"))
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert "have no time between 1990 and tomorrow (1970-01-21" in question_of(
        tmp_path / "a.parquet", "event_time"
    )


@pytest.mark.parametrize(
    ("user", "item", "last"),
    [
        ("7", "3", "0"),
        ("u9", "i4", "1"),
        ("u9", "2026-05-03T06:00:00Z", "1"),
        ("9f86d081", "i3", "0"),
    ],
)
def test_file_without_header_is_refused(user, item, last, tmp_path):
    path = tmp_path / "a.csv"
    users = [
        f"{n * 2_654_435_761 % 2**32:08x}" if len(user) == 8 else f"{user[:-1]}{n}"
        for n in range(30)
    ]
    path.write_text(
        "\n".join(
            [f"{user},{item},{last}", *(f"{each},{item},{n % 2}" for n, each in enumerate(users))]
        )
    )
    with raises(ContractError, "no header", f"'{user}'"):
        read_sample(path)


def test_columns_named_by_numbers_are_read_if_name_is_word(write):
    _, recommender = drafted(
        write(
            clicks(
                click=USERS["click"],
                **{"101": lambda row: row["user"], "7": lambda row: row["item"]},
            )
        )
    )
    assert recommender.features.categorical == ("101", "7")


def test_bounded_number_of_rows_is_read_and_reported(write):
    path = write(clicks(**USERS, shop=lambda row: 1 if row["n"] < 200 else 2))
    text = draft(read_sample(path, rows=150), name="shop", now=NOW)
    assert "from the first 150 rows of" in text
    assert "has the same value in the first 150 rows" in line_of(text, "shop")
    whole = draft(read_sample(path, rows=N), name="shop", now=NOW)
    assert f"from all {N} rows of" in whole
    assert "shop" in parse_recommender(whole, source="d").features.names
    few = read_sample(path, max_bytes=100)
    assert not few.is_whole or few.num_rows == N


def test_every_column_has_role(write):
    sample = read_sample(write(clicks(**USERS, id=lambda row: row["n"])))
    roles = {column.name: guess.role for column, guess in guess_roles(sample, now=NOW)}
    assert roles == {
        "user_id": "categorical",
        "item_id": "categorical",
        "click": "label",
        "id": LEFT_OUT,
    }
