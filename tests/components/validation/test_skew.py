"""Tests of train/serve skew: a planted difference is reported with its true share.

Pandas computes the true share. Beam requires an older Google client in this environment than
`tests/evergreen/storage` uses.
"""

import datetime as dt
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from components.validation.checks import apply_rules, observe_skew
from components.validation.skew import EventSpan, measure_skew, open_served, read_served
from evergreen.config.validation import ValidationSettings
from evergreen.contracts import criteo, raw_rows
from evergreen.contracts.category_texts import ShownValues
from evergreen.contracts.criteo import CRITEO, RAW_TYPES
from evergreen.rows.archived_rows import arrow_schema
from evergreen.runtime.errors import ContractError
from tests.support.archives import day_folders

ROWS_OF_REQUEST = 10
START = dt.datetime(2026, 3, 1, 12, tzinfo=dt.timezone.utc)


def check_skew(skew):
    rules = ValidationSettings()
    return apply_rules(observe_skew(skew, rules), rules)


def make_frame(requests: int, seed: int = 0) -> pd.DataFrame:
    """Return rows of two days.

    Each request has ten rows, and a fifth of each feature is missing.
    """
    random, n = np.random.default_rng(seed), requests * ROWS_OF_REQUEST
    frame = pd.DataFrame({raw_rows.LABEL: random.integers(0, 2, n)})
    for name in criteo.DENSE:
        frame[name] = np.where(random.random(n) < 0.2, np.nan, random.integers(1, 500, n)).astype(
            np.float32
        )
    for name in criteo.CATEGORICAL:
        frame[name] = pd.array(random.integers(0, 2**32, n), dtype="Int64")
        frame.loc[random.random(n) < 0.2, name] = pd.NA
    number = np.arange(n)
    frame[raw_rows.REQUEST_ID] = [f"r{i}" for i in number // ROWS_OF_REQUEST]
    frame[raw_rows.ROW] = number % ROWS_OF_REQUEST
    frame[raw_rows.EVENT_TIME] = [
        START + dt.timedelta(minutes=int(i)) for i in number // ROWS_OF_REQUEST
    ]
    frame[list(raw_rows.SERVED_BY)] = 1, 0.5, None, None
    return frame


def as_table(frame: pd.DataFrame) -> pa.Table:
    fields = [
        (
            name,
            pa.timestamp("us", tz="UTC")
            if text.startswith("timestamp")
            else pa.type_for_alias(text),
        )
        for name, text in criteo.RAW_TYPES.items()
    ]
    columns = [
        pa.array(frame[name].where(frame[name].notna(), None).tolist(), kind, from_pandas=True)
        for name, kind in fields
    ]
    return pa.table(columns, schema=pa.schema(fields))


@pytest.fixture
def training(tmp_path):
    def write(frame):
        path = tmp_path / "train" / "part-0.parquet"
        path.parent.mkdir(exist_ok=True)
        pq.write_table(as_table(frame), path)
        return [path]

    return write


@pytest.fixture
def archive(tmp_path):
    """Writes rows like the monitor's archive: one folder per UTC day, in another order."""

    def write(frame):
        root = tmp_path / "archive"
        for rows, folder in day_folders(root, as_table(frame.sample(frac=1, random_state=1))):
            pq.write_table(rows, folder / "part-0.parquet")
        return root

    return write


def compare(training, archive, tmp_path, **options):
    return measure_skew(
        training,
        open_served(str(archive)),
        features=criteo.CRITEO,
        settings=ValidationSettings(),
        **{"shown": ShownValues(), **options},
    )


def truth(mine: pd.DataFrame, theirs: pd.DataFrame, name: str) -> tuple[int, int]:
    """Join the rows by pandas.

    Return the numbers of joined rows and of rows that differ in `name`.
    """
    names = [raw_rows.REQUEST_ID, raw_rows.ROW]
    both = mine[[*names, name]].merge(
        theirs[[*names, name]], on=names, suffixes=("_mine", "_theirs")
    )
    left, right = both[f"{name}_mine"], both[f"{name}_theirs"]
    same = (left.isna() & right.isna()) | (
        left.notna() & right.notna() & (left == right).fillna(False)
    )
    return len(both), int((~same).sum())


def scaled(served):
    served["I3"] = (served["I3"] / 1000).astype(np.float32)


def nulled(served):
    served.loc[np.arange(len(served)) % 3 == 0, "C7"] = pd.NA


def stale(served):
    """Replace the served values of each request by the values of the previous request."""
    served["C20"] = served["C20"].shift(ROWS_OF_REQUEST)


@pytest.mark.parametrize(("plant", "name"), [(scaled, "I3"), (nulled, "C7"), (stale, "C20")])
def test_feature_served_with_other_values_is_counted_as_pandas_counts(
    training, archive, tmp_path, plant, name
):
    frame = make_frame(200)
    served = frame.copy()
    plant(served)
    skew = compare(training(frame), archive(served), tmp_path)
    assert [entry.feature for entry in skew.entries] == list(criteo.FEATURES)
    joined, differing = truth(frame, served, name)
    assert joined == len(frame)
    (found,) = [entry for entry in skew.entries if entry.drifted]
    assert (found.feature, found.differing, found.num_rows) == (name, differing, joined)
    assert found.effect == pytest.approx(differing / joined)
    assert found.factor == (pytest.approx(1000, rel=1e-3) if plant is scaled else None)
    assert (found.only_training == differing) == (plant is nulled)
    assert found.example["training"] != found.example["served"]
    (finding,) = check_skew(skew)
    assert (finding.column, finding.rule, finding.action) == (name, "skew", "warn")
    assert f"{differing:,} of {joined:,}" in finding.detail


def test_row_that_differs_is_shown_in_words_and_no_user_is(training, archive, tmp_path):
    frame = make_frame(200)
    served = frame.copy()
    served["C7"], served["C8"] = 5, 6
    shown = ShownValues(texts={"C7": {5: "red"}}, hidden=["C8"])
    skew = compare(training(frame), archive(served), tmp_path, shown=shown)
    found = {entry.feature: entry for entry in skew.entries if entry.drifted}
    assert found["C7"].example["served"] == "'red'"
    assert found["C8"].example is None
    first, second, *_ = check_skew(skew)
    assert "the served value is 'red'" in first.detail + second.detail


def test_equal_rows_give_no_skew_whatever_their_order_and_labels(training, archive, tmp_path):
    frame = make_frame(200)
    served = frame.copy()
    served[raw_rows.LABEL] = 1 - served[raw_rows.LABEL]
    skew = compare(training(frame), archive(served), tmp_path)
    assert [entry.effect for entry in skew.entries] == [0.0] * len(criteo.FEATURES)
    assert not any(entry.drifted for entry in skew.entries)
    assert check_skew(skew) == []


def test_rows_of_one_side_only_are_counted_and_name_counts_once(training, archive, tmp_path):
    frame = make_frame(200)
    mine, theirs = frame.iloc[:1500], pd.concat([frame.iloc[500:], frame.iloc[600:620]])
    late = theirs[theirs[raw_rows.EVENT_TIME] > mine[raw_rows.EVENT_TIME].max()]
    skew = compare(training(mine), archive(theirs), tmp_path)
    assert skew.facts.num_joined == 1000
    assert skew.facts.num_only_training == 500
    # Twenty rows occurred twice. Rows newer than the last training row are outside the compared
    # span.
    assert skew.facts.num_only_served == len(theirs) - len(late) - 1000 == 20


def test_of_many_rows_same_whole_requests_are_compared_on_both_sides(training, archive, tmp_path):
    frame = make_frame(400)
    served = frame.copy()
    nulled(served)
    skew = compare(training(frame), archive(served), tmp_path, sampled_rows=1000)
    assert skew.facts.one_request_in == 4
    assert (skew.facts.num_only_training, skew.facts.num_only_served) == (0, 0)
    assert skew.facts.num_joined % ROWS_OF_REQUEST == 0
    assert 600 < skew.facts.num_joined < 1400
    (found,) = [entry for entry in skew.entries if entry.drifted]
    joined, differing = truth(frame, served, "C7")
    assert found.effect == pytest.approx(differing / joined, abs=0.05)


def test_missing_as_nan_is_missing_as_null(training, archive, tmp_path):
    frame = make_frame(20)
    root = archive(frame)
    path = next(root.glob("day=*/*.parquet"))
    table = pq.read_table(path)
    values = table.column("I1").to_numpy()
    assert np.isnan(values).any()
    # `from_pandas` is off, so that NaN remains a value.
    pq.write_table(
        table.set_column(table.column_names.index("I1"), "I1", pa.array(values, pa.float32())), path
    )
    assert pq.read_table(path).column("I1").null_count == 0
    skew = compare(training(frame), root, tmp_path)
    assert not any(entry.drifted for entry in skew.entries)


def test_archive_without_days_is_reported_and_non_folder_is_refused(training, archive, tmp_path):
    frame = make_frame(20)
    served = frame.copy()
    served[raw_rows.EVENT_TIME] = START - dt.timedelta(days=30)
    skew = compare(training(frame), archive(served), tmp_path)
    assert skew.entries == ()
    (finding,) = check_skew(skew)
    assert finding.action == "info"
    assert "only 0 training rows were found" in finding.detail
    with pytest.raises(ContractError, match="nowhere is not a folder"):
        compare(training(frame), tmp_path / "nowhere", tmp_path)


def test_file_of_another_type_is_left_out_and_named(training, archive, tmp_path):
    frame = make_frame(20)
    root = archive(frame)
    path = next(root.glob("day=*/*.parquet"))
    content = path.read_bytes()
    table = pq.read_table(path)
    place = table.column_names.index("C3")
    pq.write_table(table.set_column(place, "C3", table.column("C3").cast(pa.string())), path)
    (path.parent / "whole.parquet").write_bytes(content)
    (path.parent / "torn.parquet").write_bytes(content[:100])
    skew = compare(training(frame), root, tmp_path)
    assert (skew.facts.num_joined, len(skew.facts.unread)) == (len(frame), 2)
    (finding,) = [each for each in check_skew(skew) if each.rule == "files_quarantined"]
    assert finding.action == "warn"
    assert finding.detail.startswith(
        "2 files of served rows cannot be read and were not compared; the first: "
    )
    torn, other = sorted(skew.facts.unread, key=lambda reason: "C3" in reason)
    assert re.search("torn.parquet is not a readable Parquet file", torn)
    assert re.search("column C3 is string in .*, expected int64", other)


URI = "gs://models/a lake"
DAY = dt.datetime(2026, 3, 1, tzinfo=dt.timezone.utc)
SCHEMA = arrow_schema(
    {name: RAW_TYPES[name] for name in ("request_id", "row", "event_time", "I1", "C5")}
)
SPAN = EventSpan(DAY + dt.timedelta(hours=6), DAY + dt.timedelta(hours=30))


@pytest.fixture
def put(cloud_storage):
    """Writes an object by the service's own interface, because this client only reads."""
    import requests

    session = requests.Session()
    session.trust_env = False

    def write(name: str, content: bytes) -> None:
        session.post(
            f"{cloud_storage.host}/upload/storage/v1/b/models/o",
            params={"uploadType": "media", "name": name},
            data=content,
            headers={"Content-Type": "application/octet-stream"},
        ).raise_for_status()

    return write


@pytest.fixture
def served_rows(raw_table):
    """Three days of rows, starting on the day before `DAY`."""
    return raw_table(3000, start=(DAY - dt.timedelta(days=1)).timestamp(), seconds=3 * 86_400)


@pytest.fixture
def in_both(served_rows, tmp_path, put):
    """The rows as an archive in a folder and in the bucket, with several files a day.

    Returns the folder.
    """
    for rows, folder in day_folders(tmp_path / "archive", served_rows):
        for n in range(3):
            pq.write_table(rows.slice(n * 334, 334), folder / f"part-{n}.parquet")
    for path in sorted((tmp_path / "archive").rglob("*.parquet")):
        put(f"a lake/{path.relative_to(tmp_path / 'archive')}", path.read_bytes())
    return tmp_path / "archive"


@pytest.fixture
def training_rows(served_rows, tmp_path):
    """The rows of `SPAN`. In every third row, C5 differs from the served value."""
    times = pc.cast(served_rows.column("event_time"), pa.int64()).to_pylist()
    first, last = (int(end.timestamp() * 1e6) for end in SPAN)
    rows = served_rows.filter(pa.array([first <= time <= last for time in times]))
    values = [
        None if n % 3 == 0 else value for n, value in enumerate(rows.column("C5").to_pylist())
    ]
    rows = rows.set_column(rows.schema.get_field_index("C5"), "C5", pa.array(values, pa.int64()))
    pq.write_table(rows, tmp_path / "train.parquet")
    return [tmp_path / "train.parquet"]


def measured(training_rows, archive, tmp_path):
    return measure_skew(
        training_rows, archive, features=CRITEO, settings=ValidationSettings(), shown=ShownValues()
    )


def kept_rows(archive, tmp_path):
    return pa.Table.from_batches(read_served(archive, SPAN, SCHEMA, unread=[]))


def test_archive_in_bucket_gives_what_same_one_in_folder_gives(training_rows, in_both, tmp_path):
    in_bucket, in_folder = (
        measured(training_rows, open_served(uri), tmp_path) for uri in (URI, str(in_both))
    )
    assert in_bucket.entries == in_folder.entries
    assert replace(in_bucket.facts, served_uri=in_folder.facts.served_uri) == in_folder.facts
    (found,) = [entry for entry in in_bucket.entries if entry.drifted]
    rows = pq.read_table(training_rows[0])
    assert found.feature == "C5"
    assert in_bucket.facts.num_joined == rows.num_rows
    assert found.differing == rows.num_rows // 3 + (rows.num_rows % 3 > 0)
    assert in_bucket.facts.served_uri == URI


def test_only_spans_days_are_fetched_once_and_only_spans_rows_are_kept(
    in_both, served_rows, cloud_storage, tmp_path
):
    found = kept_rows(open_served(URI), tmp_path)
    asked = [request.name for request in cloud_storage.seen if request.is_download]
    assert sorted(asked) == [
        f"a lake/day=2026-03-0{day}/part-{n}.parquet" for day in (1, 2) for n in range(3)
    ]
    times = [
        time
        for time in served_rows.column("event_time").to_pylist()
        if SPAN.first <= time <= SPAN.last
    ]
    assert found.column("event_time").to_pylist() == times
    assert found.column_names == ["request_id", "row", "event_time", "I1", "C5"]


def test_bucket_that_refuses_step_is_failure_that_retry_may_mend(
    step, write_rows, in_both, raw_table, cloud_storage, notes_of, capsys
):
    cloud_storage.fail(lambda request: True, "status", status=403, message="no access", times=10**6)
    code, report = step(write_rows(raw_table(300)), f"--served={URI}", champion="none")
    assert (code, report) == (3, None)
    assert "refused (403 no access)" in capsys.readouterr().err
    assert notes_of("r1").state == "failed"
