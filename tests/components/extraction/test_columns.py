"""Tests of excluded features, which are read only if the champion must be evaluated on them."""

import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from evergreen.contracts.manifests import Model, RawDataset
from evergreen.registry.models import model_folder
from evergreen.storage.uris import local_path
from testing.recommenders import SHOP, accept_into
from tests.support.workflows import workflow_of

FEATURES = SHOP.features
START = datetime(2026, 3, 1, tzinfo=timezone.utc)
EXCLUDED = ["price", "age", "shop", "genres"]
ASKED = json.dumps([name for name in FEATURES.names if name not in EXCLUDED])


@pytest.fixture
def champion_without(released, tmp_path):
    """Releases a model that was trained without some features."""

    def release(*excluded):
        released("2026-02-01T00:00:00+00:00")
        folder = model_folder(tmp_path / "my store", "m1")
        workflow_of([[]] * len(FEATURES.slots), FEATURES, excluded=excluded).save(
            folder / Model.WORKFLOW
        )

    return release


def values_in(dataset, names):
    """Map each part and each column to its number of values that are not null."""
    found = {}
    for part in ("train", "holdout"):
        paths = sorted(local_path(getattr(dataset, f"{part}_uri")).iterdir())
        table = pa.concat_tables([pq.read_table(path, partitioning=None) for path in paths])
        found[part] = {name: table.num_rows - table[name].null_count for name in names}
    return found


def test_lake_that_lacks_excluded_column_is_read(flags, run_main, capsys):
    for path in local_path(flags["--lake"]).rglob("*.parquet"):
        pq.write_table(pq.read_table(path, partitioning=None).drop(["shop"]), path)
    assert run_main(flags) == 2
    assert "other files lack the column shop" in capsys.readouterr().err
    assert run_main(flags, columns=ASKED) == 0
    assert RawDataset.read(flags["--output"]).num_train_rows == 900


def test_what_champion_learns_from_is_read_all_same(flags, run_main, champion_without):
    champion_without("age", "genres", "user")
    assert run_main(flags, columns=ASKED) == 0
    dataset = RawDataset.read(flags["--output"])
    assert dataset.excluded_columns == EXCLUDED
    found = values_in(dataset, EXCLUDED)
    for part in found.values():
        assert (part["age"], part["genres"]) == (0, 0)
        assert min(part["price"], part["shop"]) > 0


def test_champion_whose_columns_are_gone_is_refused_before_any_read(
    flags, run_main, champion_without, capsys, tmp_path
):
    champion_without()
    fewer = replace(SHOP, features=replace(FEATURES, numeric=FEATURES.numeric[:-1]))
    accept_into(tmp_path / "my store", fewer)
    for parent, way in (("none", "--from-scratch"), ("current", "-p champion=none")):
        assert run_main(flags, parent=parent) == 2
        assert "the champion m1 needs columns ['age'], which this run does not have" in (
            said := capsys.readouterr().err
        )
        assert f"to run without a champion, run it again with `{way}`" in said
    assert run_main(flags, parent="none", champion="none") == 0


@pytest.mark.parametrize(
    ("days_without", "said"),
    [
        ([1], None),
        ([1, 2], "2026-03-02/part-0.parquet and 1 other files lack the column cost"),
        (
            [2],
            "2026-03-02/part-0.parquet lacks the column cost, which a file of an earlier day has",
        ),
    ],
)
def test_column_that_came_later_is_missing_in_days_before(
    flags, run_main, capsys, tmp_path, champion_without, days_without, said
):
    champion_without()
    more = replace(SHOP, features=replace(FEATURES, numeric=("cost", *FEATURES.numeric[::-1])))
    accept_into(tmp_path / "my store", more)
    for path in local_path(flags["--lake"]).rglob("*.parquet"):
        if int(path.parent.name[-2:]) not in days_without:
            rows = pq.read_table(path, partitioning=None)
            pq.write_table(rows.append_column("cost", rows["price"].fill_null(7)), path)
    assert run_main(flags, parent="none") == (2 if said else 0)
    if said:
        assert said in capsys.readouterr().err
    else:
        rows = pa.concat_tables(
            map(pq.read_table, local_path(RawDataset.read(flags["--output"]).train_uri).iterdir())
        )
        assert (
            rows["cost"]
            .is_null()
            .equals(pc.less(rows["event_time"], pa.scalar(START + timedelta(days=1))))
        )
