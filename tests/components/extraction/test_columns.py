"""Features that a run leaves out: not read, unless the champion must be judged by them."""

from __future__ import annotations

import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.contracts.criteo import CRITEO, FEATURES
from components.contracts.manifests import Model, RawDataset
from components.contracts.recommender import Recommender
from components.extraction.columns import unread_columns
from components.storage.uris import local_path
from components.store.models import model_folder, stored_model
from tests.support.recommenders import accept_into
from tests.support.workflows import workflow_of

EXCLUDED = ["I2", "I13", "C7", "C26"]
ASKED = json.dumps([name for name in FEATURES if name not in EXCLUDED])


@pytest.fixture
def champion_without(released, tmp_path):
    """Releases a model that learned without some features."""

    def release(*excluded):
        released("2026-02-01T00:00:00+00:00")
        folder = model_folder(tmp_path / "my store", "m1")
        workflow_of([[]] * 26, excluded=excluded).save(folder / Model.WORKFLOW)

    return release


def values_in(dataset, names):
    """Number of values per column and part."""
    found = {}
    for part in ("train", "holdout"):
        paths = sorted(local_path(getattr(dataset, f"{part}_uri")).iterdir())
        table = pa.concat_tables([pq.read_table(path, partitioning=None) for path in paths])
        found[part] = {name: table.num_rows - table[name].null_count for name in names}
    return found


def test_excluded_columns_are_null_in_the_rows_and_named_in_the_manifest(flags, run_main):
    assert run_main(flags, columns=ASKED) == 0
    dataset = RawDataset.read(flags["--output"])
    assert dataset.excluded_columns == EXCLUDED
    found = values_in(dataset, FEATURES)
    for part in found.values():
        assert {name for name, num in part.items() if num == 0} == set(EXCLUDED)


def test_a_lake_that_lacks_an_excluded_column_is_read(flags, run_main, capsys):
    for path in local_path(flags["--lake"]).rglob("*.parquet"):
        pq.write_table(pq.read_table(path, partitioning=None).drop(["C7"]), path)
    assert run_main(flags) == 2
    assert "lacks the columns ['C7']" in capsys.readouterr().err
    assert run_main(flags, columns=ASKED) == 0
    assert RawDataset.read(flags["--output"]).num_train_rows == 900


def test_what_the_champion_learns_from_is_read_all_the_same(flags, run_main, champion_without):
    champion_without("I13", "C26", "C1")
    assert run_main(flags, columns=ASKED) == 0
    dataset = RawDataset.read(flags["--output"])
    assert dataset.excluded_columns == EXCLUDED
    found = values_in(dataset, EXCLUDED)
    for part in found.values():
        assert (part["I13"], part["C26"]) == (0, 0)
        assert min(part["I2"], part["C7"]) > 0


def test_a_champion_of_other_columns_or_of_another_order_is_refused_before_anything_is_read(
    flags, run_main, champion_without, capsys, tmp_path
):
    champion_without()
    first, second, *others = CRITEO.numeric
    turned = Recommender(name="click_model", features=replace(CRITEO, numeric=(second, first, *others)))
    accept_into(tmp_path / "my store", turned)
    assert run_main(flags, parent="none") == 2
    assert "columns of the champion m1 are {'numeric': ['I1', 'I2'" in (said := capsys.readouterr().err)
    assert "{'numeric': ['I2', 'I1'" in said
    assert "champion=none" in said
    assert run_main(flags, parent="none", champion="none") == 0


def test_a_chain_of_rounds_without_a_column_reads_it_in_none(tmp_path, champion_without):
    champion_without(*EXCLUDED)
    champion = stored_model(tmp_path / "my store", "m1")
    assert unread_columns(EXCLUDED, champion) == unread_columns(EXCLUDED, None) == set(EXCLUDED)
    assert unread_columns([], champion) == set()
