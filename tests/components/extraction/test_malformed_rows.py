"""Tests of malformed rows: each is stored with a reason, and a run with too many is refused."""

from functools import partial

import pytest

from evergreen.contracts import criteo
from evergreen.rows import forms
from evergreen.rows.raw_schema import CHECKED_FROM_ROWS, MalformedRows
from evergreen.runtime.errors import ContractError
from tests.support.errors import raises, raises_text

find_reader = partial(forms.find_reader, recommender=criteo.CRITEO_RECOMMENDER)


@pytest.mark.parametrize(("num_bad", "refused"), [(1, False), (2, True)])
def test_share_above_maximum_is_refused_with_counts_and_examples(
    tmp_path, criteo_rows, write_text, read, num_bad, refused
):
    rows = criteo_rows(100)
    for i in range(num_bad):
        rows[10 + i][20] = "no hex"
    path = write_text(tmp_path / "day_0", rows)
    if not refused:
        assert len(read(find_reader(path), max_fraction=0.01)[0]) == 99
        return
    reason = "C7 is 'no hex', expected 1 to 8 hex digits or nothing"
    with raises_text(
        ContractError,
        "malformed-rows",
        file=path,
        bad=2,
        rows=100,
        share="2.00%",
        limit="1.00%",
        first=f"line 11: {reason}; line 12: {reason}",
    ):
        read(find_reader(path), max_fraction=0.01)


def test_each_file_is_evaluated_by_itself(tmp_path):
    with MalformedRows(tmp_path / "s.jsonl", max_fraction=0.1) as malformed:
        malformed.count(tmp_path / "good", 1000)
        malformed.add(tmp_path / "bad", 1, "reason", text="text")
        malformed.count(tmp_path / "bad", 2)
        with raises(ContractError, "bad", "1 of 2 rows"):
            malformed.check()


def test_garbage_stops_before_end_of_large_file(tmp_path):
    with MalformedRows(tmp_path / "s.jsonl", max_fraction=0.0) as malformed:
        malformed.add(tmp_path / "bad", 1, "reason", text="text")
        malformed.count(tmp_path / "bad", CHECKED_FROM_ROWS - 1)
        with raises(ContractError, "bad", "1 of 10000 rows", "(0.01%)"):
            malformed.count(tmp_path / "bad", 1)
