"""Tests of flipped bits in a lake's Parquet files: readers report an error or correct rows."""

import random

import pyarrow.parquet as pq
import pytest

from cli.forget import rewrite
from cli.ingest import main as ingest
from evergreen.contracts import raw_rows
from evergreen.contracts.criteo import CRITEO, CRITEO_RECOMMENDER
from evergreen.rows.archived_rows import parquet_file, reading_parquet
from evergreen.rows.raw_schema import PartWriter, raw_schema
from evergreen.runtime.errors import ContractError
from evergreen.storage.folder import FolderObjects
from monitoring.uploader import Uploader
from testing.recommenders import accept_into
from tests.support.errors import raises
from tests.support.flips import QUIET, count_flips
from tests.support.monitors import Bench, clicks, prediction

FLIPS = [pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]), 150]


def by_ingest(folder, criteo_table):
    pq.write_table(criteo_table(400), folder / "data.parquet")
    accept_into(folder / "store", CRITEO_RECOMMENDER)
    flags = {"store": folder / "store", "data": folder / "data.parquet", "lake": folder / "lake"}
    assert ingest([f"--{name}={value}" for name, value in flags.items()]) == 0
    return next(iter(sorted((folder / "lake").glob("day=*/*.parquet"))))


def by_monitor_and_uploader(folder, criteo_table):
    bench = Bench(
        folder,
        recommender=CRITEO_RECOMMENDER,
        attribution_window_seconds=30.0,
        archive_roll_rows=50,
    )
    bench.start()
    start = bench.clock.now
    bench.tick(
        *(
            prediction(f"request {n}", time=start, features=CRITEO_RECOMMENDER.features)
            for n in range(20)
        )
    )
    bench.tick(clicks("clicks", [("request 3", 2, start + 1.0)]))
    bench.turn(20, 30.0)
    bench.monitor.stop()
    Uploader(bench.settings.archive, folder / "lake", clock=bench.clock).run_once()
    bench.close()
    return next(iter(sorted((folder / "lake").glob("day=*/*.parquet"))))


def by_extraction(folder, criteo_table):
    with PartWriter(folder) as writer:
        writer.write(criteo_table(400).cast(raw_schema(CRITEO)))
    return writer.parts[0].path


def by_forget(folder, criteo_table):
    path = by_ingest(folder, criteo_table)
    objects = FolderObjects(folder / "lake")
    (info,) = [each for each in objects.list() if objects.local(each.name) == path]
    rewrite(objects, info, lambda batch: batch.slice(1))
    return path


@pytest.mark.parametrize("flips", FLIPS)
@pytest.mark.parametrize("write", [by_ingest, by_monitor_and_uploader, by_extraction, by_forget])
def test_no_flipped_bit_is_read_as_other_rows(tmp_path, criteo_table, write, flips):
    path = write(tmp_path, criteo_table)
    columns = [
        raw_rows.REQUEST_ID,
        raw_rows.ROW,
        raw_rows.EVENT_TIME,
        raw_rows.LABEL,
        *CRITEO.names,
    ]
    types = {name: pq.read_schema(path).field(name).type for name in columns}

    def read():
        with reading_parquet(path), parquet_file(path) as file:
            table = file.read(columns=columns)
        # Columns are read by name with the types of the raw schema, like in all readers of the
        # project.
        if {field.name: field.type for field in table.schema} != types:
            raise ContractError(f"{path} has other columns")
        return table

    found = count_flips(path, read, flips=flips)
    print(write.__name__, dict(found))
    assert found[QUIET] == 0, found


def test_flipped_bit_in_page_is_named_with_its_file(tmp_path, criteo_table):
    path = by_extraction(tmp_path, criteo_table)
    content = bytearray(path.read_bytes())
    content[random.Random(1).randrange(1000, len(content) // 2)] ^= 16
    path.write_bytes(content)
    with (
        raises(ContractError, path, "CRC"),
        reading_parquet(path),
    ):
        parquet_file(path).read()
