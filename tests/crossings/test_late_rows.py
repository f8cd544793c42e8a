"""Rows that came late, through the real steps: validated, encoded and learnt before the window's, and noted as seen."""

from __future__ import annotations

from datetime import date

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.contracts import criteo, raw_rows
from components.contracts.features import MISSING_CATEGORY
from components.contracts.workflow import FeatureWorkflow
from components.storage.uris import local_path
from inference_client.simulation.lake import write_lake
from inference_client.simulation.world import Drift, World

pytestmark = pytest.mark.timeout(300)

NUM_LATE = 400


def _rows(folder_uri):
    files = sorted(local_path(folder_uri).glob("*.parquet"))
    return pa.concat_tables([pq.ParquetFile(path).read() for path in files])


@pytest.fixture(scope="module")
def third(chain, tmp_path_factory):
    """A third round, before which the second one's two days have got files of their own beside theirs."""
    later = chain.copied_to(tmp_path_factory.mktemp("late rows"))
    world = World.create(seed=3).drifted(Drift(seed=5))
    write_lake(world, str(later.root / "aside"), rows=NUM_LATE, days=2, last_day=date(2026, 1, 5), seed=8)
    for path in sorted((later.root / "aside").rglob("*.parquet")):
        table = pq.ParquetFile(path).read()
        at = table.schema.get_field_index(raw_rows.REQUEST_ID)
        names = pa.array([f"late-{name}" for name in table[raw_rows.REQUEST_ID].to_pylist()])
        moved = table.set_column(at, raw_rows.REQUEST_ID, names)
        pq.write_table(moved, later.root / "lake" / path.parent.name / f"late-{path.name}")
    write_lake(world, str(later.root / "lake"), rows=1000, days=1, last_day=date(2026, 1, 6), seed=9)
    return later.turn_to_training("round-3")


def test_a_model_names_the_files_that_lay_in_the_lake_in_its_round(chain, third):
    for this in (*chain.rounds, third):
        assert this.training.files == this.preprocessing.files == this.extraction.files
    second = chain.rounds[1].training.files
    assert set(second) == {"2026-01-04", "2026-01-05"}
    new = {day: set(files) - set(second.get(day, ())) for day, files in third.training.files.items()}
    assert {day: len(names) for day, names in new.items()} == {"2026-01-05": 1, "2026-01-06": 1}


def test_late_rows_are_learnt_before_the_windows_and_encoded_as_these_are(chain, third):
    raw = _rows(third.extraction.train_uri)
    num_late = third.extraction.num_late_rows
    late = raw.slice(0, num_late)
    # Those that are newer than what the second round learned are among the window's.
    assert NUM_LATE / 2 < num_late < NUM_LATE
    names = raw[raw_rows.REQUEST_ID].to_pylist()
    assert sum(name.startswith("late-") for name in names) == NUM_LATE
    assert all(name.startswith("late-") for name in late[raw_rows.REQUEST_ID].to_pylist())
    assert max(late[raw_rows.EVENT_TIME].to_pylist()).isoformat() <= chain.rounds[1].training.last_learned_time
    judged_before = chain.rounds[1].extraction.num_holdout_rows
    assert third.training.num_train_rows == raw.num_rows
    assert raw.num_rows + third.extraction.num_holdout_rows == NUM_LATE + judged_before + 1000
    encoded = _rows(third.preprocessing.train_uri)
    workflow = FeatureWorkflow.load(local_path(third.preprocessing.workflow_uri))
    values = np.stack([raw[n].fill_null(MISSING_CATEGORY).to_numpy() for n in criteo.CATEGORICAL], axis=1)
    ids = np.stack([encoded[name].to_numpy() for name in criteo.CATEGORICAL], axis=1)
    np.testing.assert_array_equal(ids, workflow.encode_categorical(values))


def test_validation_judges_them_with_the_window_and_lineage_tells_their_days(third):
    assert third.validation.num_rows == third.extraction.num_train_rows
    told = {each["day"]: each.get("num_late_rows") for each in third.training.days if not each.get("replay")}
    on_second_day = third.extraction.num_late_rows - NUM_LATE // 2
    assert told == {"2026-01-04": NUM_LATE // 2, "2026-01-05": on_second_day, "2026-01-06": None}
