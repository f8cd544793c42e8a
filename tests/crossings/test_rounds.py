"""Tests of the training and evaluation rows of three rounds, as the training step reads them.

Late rows are validated, encoded and used for training before the window's rows, and recorded as
seen.
"""

from collections import Counter
from datetime import date

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.training.rows import RowFolder, open_rows
from demo.simulation.simulator import Drift, Simulator, write_lake
from evergreen.config.features import MISSING_CATEGORY
from evergreen.contracts.criteo import CATEGORICAL, FEATURES
from evergreen.contracts.raw_rows import EVENT_TIME, REQUEST_ID, ROW
from evergreen.contracts.workflow import FeatureWorkflow
from evergreen.storage.uris import local_path
from tests.support.lakes import keys_in, table_in

pytestmark = pytest.mark.timeout(300)

NUM_LATE = 400


@pytest.fixture(scope="module")
def three(chain, tmp_path_factory):
    """The chain with its two rounds and a third round.

    Before the third round, the days of the second round get more files, one of which is truncated.
    """
    later = chain.copied_to(tmp_path_factory.mktemp("three rounds"))
    changed = {"replay_share": 0, "max_quarantined_file_fraction": 0.5}
    later.settings = {**later.settings, "extraction": {**later.settings["extraction"], **changed}}
    (later.root / "lake" / "day=2026-01-05" / "torn.parquet").write_bytes(b"PAR1 and no more")
    simulator = Simulator.create(seed=3).drifted(Drift(seed=5))
    write_lake(
        simulator,
        str(later.root / "aside"),
        rows=NUM_LATE,
        days=2,
        last_day=date(2026, 1, 5),
        seed=8,
    )
    for path in sorted((later.root / "aside").rglob("*.parquet")):
        table = pq.ParquetFile(path).read()
        names = pa.array([f"late-{name}" for name in table[REQUEST_ID].to_pylist()])
        moved = table.set_column(table.schema.get_field_index(REQUEST_ID), REQUEST_ID, names)
        pq.write_table(moved, later.root / "lake" / path.parent.name / f"late-{path.name}")
    write_lake(
        simulator, str(later.root / "lake"), rows=1000, days=1, last_day=date(2026, 1, 6), seed=9
    )
    return later, [*chain.rounds, later.turn_to_training("round-3")]


def _training_rows(this, cache):
    """Return the identities of the rows that training reads in this round.

    The number of rows must match the manifest.
    """
    encoded = this.preprocessing
    features = encoded.recommender.features
    folder = RowFolder(
        path=local_path(encoded.train_uri), num_rows=encoded.num_train_rows, features=features
    )
    rows = open_rows([folder], encoded.slot_sizes, cache)
    keys = keys_in(this.extraction.train_uri)
    assert len(rows) == len(keys) == this.training.num_train_rows
    np.testing.assert_array_equal(
        rows.labels, table_in(this.extraction.train_uri)["label"].to_numpy()
    )
    return keys


def _lake(chain):
    table = pa.concat_tables(
        [
            pq.ParquetFile(path).read()
            for path in sorted((chain.root / "lake").rglob("*.parquet"))
            if path.name != "torn.parquet"
        ]
    )
    assert set(FEATURES) <= set(table.column_names)
    return dict(
        zip(
            zip(table[REQUEST_ID].to_pylist(), table[ROW].to_pylist()),
            table[EVENT_TIME].to_pylist(),
        )
    )


def test_lineage_trains_on_each_row_once_and_evaluates_it_in_next_run(three, tmp_path):
    chain, rounds = three
    trained = [_training_rows(this, tmp_path) for this in rounds]
    holdout = [keys_in(this.extraction.holdout_uri) for this in rounds]
    assert set(Counter(key for keys in trained for key in keys).values()) == {1}
    for before, after in zip(holdout, trained[1:]):
        assert len(before) > 100
        assert set(before) <= set(after)
    assert {key for keys in trained for key in keys} | set(holdout[-1]) == _lake(chain).keys()


def test_model_names_files_that_were_in_lake_in_its_round(three):
    _, (first, second, third) = three
    for this in (first, second, third):
        assert this.training.files == this.preprocessing.files == this.extraction.files
    second = second.training.files
    assert [day for day, files in second.items() if files] == [
        f"2026-01-0{number}" for number in range(1, 6)
    ]
    new = {
        day: set(files) - set(second.get(day, ())) for day, files in third.training.files.items()
    }
    late, own = {"2026-01-04": 1}, {"2026-01-05": 1, "2026-01-06": 1}
    assert {day: len(names) for day, names in new.items() if names} == late | own


def test_late_rows_are_trained_on_before_windows_and_encoded_like_them(three):
    _, (_, second, third) = three
    raw = table_in(third.extraction.train_uri)
    num_late = third.extraction.num_late_rows
    late = raw.slice(0, num_late)
    # All rows of the test's window are newer than the training rows of the second round.
    assert NUM_LATE / 2 < num_late < NUM_LATE
    names = raw[REQUEST_ID].to_pylist()
    assert sum(name.startswith("late-") for name in names) == NUM_LATE
    assert all(name.startswith("late-") for name in late[REQUEST_ID].to_pylist())
    assert max(late[EVENT_TIME].to_pylist()).isoformat() <= second.training.watermark
    evaluated_before = second.extraction.num_holdout_rows
    assert third.training.num_train_rows == raw.num_rows
    assert raw.num_rows + third.extraction.num_holdout_rows == NUM_LATE + evaluated_before + 1000
    encoded = table_in(third.preprocessing.train_uri)
    workflow = FeatureWorkflow.load(local_path(third.preprocessing.workflow_uri))
    values = np.stack([raw[n].fill_null(MISSING_CATEGORY).to_numpy() for n in CATEGORICAL], axis=1)
    ids = np.stack([encoded[name].to_numpy() for name in CATEGORICAL], axis=1)
    np.testing.assert_array_equal(ids, workflow.encode_categorical(values))


def test_validation_reads_window_and_lineage_contains_its_days(three):
    _, (*_, third) = three
    assert third.validation.num_rows == third.extraction.num_train_rows
    recorded = {
        each["day"]: each.get("num_late_rows")
        for each in third.training.days
        if not each.get("replay")
    }
    on_second_day = third.extraction.num_late_rows - NUM_LATE // 2
    assert recorded == {
        "2026-01-04": NUM_LATE // 2,
        "2026-01-05": on_second_day,
        "2026-01-06": None,
    }


def test_model_names_files_whose_rows_it_could_not_train_on(three):
    _, (*_, third) = three
    assert third.training.unread_files == {"2026-01-05": {"torn.parquet": ""}}
    assert "torn.parquet" not in third.training.files["2026-01-05"]
    assert [each.rule for each in third.validation.findings if each.rule == "files_quarantined"]
