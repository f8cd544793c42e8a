"""Tests of time formats in common exports.

Formats are recognized from the values of a column, and an ambiguous format leads to a question.
"""

from datetime import datetime, timedelta, timezone

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evergreen.config.data import TIME_FORMATS
from evergreen.rows.time_forms import FORMS, ISO, NAMES, TimeRule, find_form, iso_micros
from evergreen.runtime.errors import ContractError
from tests.support.errors import raises

NOW = datetime(2026, 11, 29, tzinfo=timezone.utc)
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
TIMES = [
    datetime(2026, 2, 24, 5, 17, 3, tzinfo=timezone.utc) + timedelta(minutes=47 * i)
    for i in range(400)
]
WRITTEN = {
    "seconds": (lambda t: int(t.timestamp()), timedelta(seconds=1)),
    "milliseconds": (lambda t: int(t.timestamp()) * 1000, timedelta(seconds=1)),
    "microseconds": (lambda t: int(t.timestamp()) * 10**6, timedelta(seconds=1)),
    "nanoseconds": (lambda t: int(t.timestamp()) * 10**9, timedelta(seconds=1)),
    "YYYYMMDD": (lambda t: int(t.strftime("%Y%m%d")), timedelta(days=1)),
    "YYMMDDhh": (lambda t: int(t.strftime("%y%m%d%H")), timedelta(hours=1)),
    "YYYYMMDDhh": (lambda t: int(t.strftime("%Y%m%d%H")), timedelta(hours=1)),
    "YYMMDDhhmm": (lambda t: int(t.strftime("%y%m%d%H%M")), timedelta(minutes=1)),
    "YYYYMMDDhhmm": (lambda t: int(t.strftime("%Y%m%d%H%M")), timedelta(minutes=1)),
    "YYYYMMDDhhmmss": (lambda t: int(t.strftime("%Y%m%d%H%M%S")), timedelta(seconds=1)),
}


def form_of(values, *, now=NOW):
    return find_form(pa.array(values), now=now.timestamp(), name="ts")


def times_of(values, form):
    return TimeRule(form=form).parse(pa.array(values)).values.to_pylist()


def test_formats_are_those_that_recommender_may_name():
    assert NAMES == TIME_FORMATS
    assert {ISO, *WRITTEN} == set(NAMES)


@pytest.mark.parametrize("form", WRITTEN)
@pytest.mark.parametrize("kind", [int, str], ids=["numbers", "texts"])
def test_format_is_recognized_from_values_and_gives_their_times(form, kind):
    write, unit = WRITTEN[form]
    values = [kind(write(time)) for time in TIMES]
    assert form_of(values) == form
    assert times_of(values, form) == [EPOCH + (time - EPOCH) // unit * unit for time in TIMES]


@pytest.mark.parametrize(
    "first",
    [datetime(1999, 3, 1), datetime(2004, 2, 20), datetime(2012, 12, 20), datetime(2023, 6, 1)],
)
@pytest.mark.parametrize("form", ["seconds", "milliseconds", "YYYYMMDD", "YYMMDDhh", "YYMMDDhhmm"])
def test_format_is_recognized_in_any_year_or_leads_to_question(first, form):
    write, _ = WRITTEN[form]
    values = [
        str(write(first.replace(tzinfo=timezone.utc) + timedelta(minutes=47 * i)))
        for i in range(3000)
    ]
    if form.startswith("YY") and form[2] != "Y" and first.year < 2000:
        return  # years of two digits begin with 2000
    if form.startswith("YYM"):
        width = len(form)
        values = [value.zfill(width) for value in values]
    assert form_of(values) == form


def test_numbers_with_two_possible_time_formats_lead_to_question():
    with raises(ContractError, "ts", "'20101201'", "YYYYMMDD or YYMMDDhh", "data.time_format"):
        form_of(["20101201", "20101203"])
    assert form_of(["20101201", "20101231"]) == "YYYYMMDD"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["0", "17", "90000"], "read as seconds since 1970: 1970-01-01 to 1970-01-02"),
        (["4000000000", "4000000060"], "read as seconds since 1970: 2096-10-02 to 2096-10-02"),
        (
            ["soon", "later"],
            "ts is 'soon', which is not a time between 1990 and tomorrow; expected ISO 8601",
        ),
        ([20513, 20514, 20515], "ts is 20513, which is not a time"),
        (["1.77E+09", "1.78E+09"], "ts is '1.77E.09', which is not a time"),
        (["01/02/2026", "03/02/2026"], "ts is '01/02/2026', which is not a time"),
    ],
)
def test_values_outside_of_times_are_refused_with_span_that_they_would_have(values, message):
    with pytest.raises(ContractError, match=message):
        form_of(values)


def test_future_time_within_day_is_accepted_and_later_one_is_not():
    tomorrow, later = (int((NOW + timedelta(days=days)).timestamp()) for days in (1, 2))
    assert form_of([tomorrow]) == "seconds"
    with pytest.raises(ContractError):
        form_of([later])


ISO_TEXTS = {
    "2026-03-01": (2026, 3, 1),
    "2026/03/01": (2026, 3, 1),
    "2026-03-01 04:05": (2026, 3, 1, 4, 5),
    "2026-03-01T04:05:06": (2026, 3, 1, 4, 5, 6),
    "2026-03-01 04:05:06 UTC": (2026, 3, 1, 4, 5, 6),
    "2026-03-01 04:05:06.5 UTC": (2026, 3, 1, 4, 5, 6, 500_000),
    "2026-03-01 04:05:06.123456789Z": (2026, 3, 1, 4, 5, 6, 123_456),
    "2026-03-01T04:05:06+02:00": (2026, 3, 1, 2, 5, 6),
    "2026-03-01T04:05:06-0530": (2026, 3, 1, 9, 35, 6),
    "2026-03-01T04:05:06+02": (2026, 3, 1, 2, 5, 6),
    "20260301T040506Z": (2026, 3, 1, 4, 5, 6),
}


@pytest.mark.parametrize(("text", "parts"), ISO_TEXTS.items(), ids=ISO_TEXTS)
def test_iso_times_and_bigquerys_are_read_alone_and_among_others(text, parts):
    expected = datetime(*parts, tzinfo=timezone.utc)
    assert form_of([text]) == ISO
    assert times_of([text, "2026-02-30", None, "NULL"], ISO) == [expected, None, None, None]
    parsed = TimeRule(form=ISO).parse(pa.array([text, "2026-02-30", None, "NULL"]))
    assert parsed.is_wrong.to_pylist() == [False, True, False, False]
    assert parsed.is_missing.to_pylist() == [False, False, True, True]


@given(st.datetimes(datetime(1, 1, 1), datetime(9999, 12, 31)), st.integers(-14 * 60, 14 * 60))
@settings(max_examples=200)
def test_iso_times_are_pythons(time, offset):
    text = time.replace(tzinfo=timezone(timedelta(minutes=offset))).isoformat()
    assert iso_micros(text) == (datetime.fromisoformat(text) - EPOCH) // timedelta(microseconds=1)


@pytest.mark.parametrize("form", FORMS)
def test_any_number_is_parsed_or_marked_as_wrong_in_every_form(form):
    values = [
        "0",
        "1",
        "99999999999999999999",
        "-5",
        "1e9",
        "18446744073709551615",
        "9" * 19,
        "1.5",
        "0.0",
    ]
    parsed = TimeRule(form=form).parse(pa.array(values))
    assert len(parsed.values) == len(values)
    assert parsed.is_wrong.to_pylist() == [value is None for value in parsed.values.to_pylist()]


def test_numbers_of_short_span_with_digits_by_chance_lead_to_question():
    values = [1610121200 + second for second in range(60)]
    with raises(ContractError, "YYMMDDhhmm or seconds"):
        form_of(values)
    assert form_of([1610121200 + 61 * minute for minute in range(60)]) == "seconds"


def test_scientific_notation_is_read_where_it_shows_every_digit():
    assert form_of(["1.772323200E+09", "1.772323260E+09"]) == "seconds"
    assert times_of(["1.772323200E+09", "1.7723E+09"], "seconds") == [
        datetime(2026, 3, 1, tzinfo=timezone.utc),
        None,
    ]


def test_invalid_zones_and_inexact_floats_are_no_times():
    assert iso_micros("2026-01-10T00:00:00+99:99") is None
    column = pa.array([1772323237.0], pa.float32())
    assert TimeRule(form="seconds").parse(column).is_wrong.to_pylist() == [True]


def test_columns_of_lists_are_no_times():
    with raises(ContractError, "list<item: int64>", "expected times"):
        form_of([[1]])
