"""Criteo rows as text, an independent parser (csv, gzip, int), and lakes of raw tables."""

import csv
import gzip
import io
import json
import random
from dataclasses import fields
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.extraction.__main__ import main
from components.extraction.extract import extract
from evergreen.config.extraction import ExtractionSettings
from evergreen.config.features import Features
from evergreen.contracts import criteo, raw_rows
from evergreen.contracts.manifests import RawDataset
from evergreen.rows.raw_schema import MalformedRows
from evergreen.rows.times import TimeSpan
from testing.recommenders import accept_into, settings_text, with_sections
from testing.releases import make_live, store_model
from testing.releases import release as write_release
from tests.support.archives import day_folders
from tests.support.lakes import folder_lake


@pytest.fixture
def raw_table(criteo_table):
    """Draws Criteo's rows of different times. Each row is its own request by default."""
    return partial(criteo_table, request_rows=1)


@pytest.fixture
def recommender():
    """The recommender of the lakes. The conftest.py of a test folder may override this fixture."""
    return criteo.CRITEO_RECOMMENDER


@pytest.fixture
def criteo_rows():
    """Return `n` rows of 40 texts: the label, integers and hex categories.

    I2 is sometimes negative. An empty text stands for a missing value.
    """

    def make(n: int, *, seed: int = 0) -> list[list[str]]:
        source = random.Random(seed)
        rows = []
        for _ in range(n):
            dense = [
                "" if source.random() < 0.2 else str(int(source.lognormvariate(2, 2)))
                for _ in criteo.DENSE
            ]
            dense[1] = str(source.randint(-2, 50))
            cats = [
                "" if source.random() < 0.1 else f"{source.getrandbits(32):08x}"
                for _ in criteo.CATEGORICAL
            ]
            rows.append([str(int(source.random() < 0.25)), *dense, *cats])
        return rows

    return make


@pytest.fixture
def write_text():
    """Write rows as delimited lines, gzipped if the name ends in .gz."""

    def write(
        path: Path,
        rows: list[list[str]],
        *,
        delimiter: str = "\t",
        header: str = "",
        end: str = "\n",
    ) -> Path:
        text = (header + end if header else "") + "".join(delimiter.join(row) + end for row in rows)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
        return path

    return write


@pytest.fixture
def expected_rows():
    """Parse Criteo text with the standard library.

    A row is a tuple of the label and the numbers. An empty field is None.
    """

    def parse(rows: list[list[str]]) -> list[tuple]:
        text = io.StringIO("\n".join("\t".join(row) for row in rows))
        return [
            (
                int(row[0]),
                *(float(x) if x else None for x in row[1:14]),
                *(int(x, 16) if x else None for x in row[14:]),
            )
            for row in csv.reader(text, delimiter="\t", quoting=csv.QUOTE_NONE)
        ]

    return parse


@pytest.fixture
def read(tmp_path):
    """Read everything from a reader.

    Returns:
        The click columns of its rows as tuples, and the rejected lines as parsed JSON.
    """

    def run(reader, *, max_fraction: float = 1.0) -> tuple[list[tuple], list[dict]]:
        path = tmp_path / "read.jsonl"
        path.unlink(missing_ok=True)
        with MalformedRows(path, max_fraction=max_fraction) as malformed:
            batches = list(reader.batches(malformed))
            rows = [row for batch in batches for row in click_tuples(batch, criteo.CRITEO)]
            malformed.check()
        return rows, [
            json.loads(line) for line in path.read_text().splitlines()
        ] if path.exists() else []

    return run


def click_tuples(table, features: Features) -> list[tuple]:
    columns = [table.column(name).to_pylist() for name in (raw_rows.LABEL, *features.names)]
    return list(zip(*columns))


@pytest.fixture
def clicks(recommender):
    """Return the click columns of a table or batch as tuples."""
    return partial(click_tuples, features=recommender.features)


@pytest.fixture
def write_lake():
    """Write a raw table into day partitions below a folder, with `num_files` files a day."""

    def write(folder: Path, table, *, num_files: int = 1, row_group_size: int = 100) -> Path:
        for rows, partition in day_folders(folder, table):
            for k in range(num_files):
                part = rows.take(pa.array(range(k, rows.num_rows, num_files), pa.int64()))
                pq.write_table(part, partition / f"part-{k}.parquet", row_group_size=row_group_size)
        return folder

    return write


START = datetime(2026, 3, 1, tzinfo=timezone.utc)
ALL = TimeSpan()


@pytest.fixture
def flags(tmp_path, raw_table, write_lake, recommender):
    accept_into(tmp_path / "my store", recommender)
    lake = write_lake(
        tmp_path / "my lake", raw_table(1000, start=START.timestamp(), seconds=2 * 86_400)
    )
    return {
        "--run": "run 1",
        "--store": (tmp_path / "my store").as_uri(),
        "--work": str(tmp_path / "my work"),
        "--lake": lake.as_uri(),
        "--output": str(tmp_path / "out" / "raw.json"),
    }


@pytest.fixture
def released(tmp_path, recommender):
    """Release a model whose newest training row has the time `watermark`.

    `more` contains additional fields of the release's manifest.
    """

    def release(watermark: str, *, model_id: str = "m1", version: int = 1, **more) -> None:
        store = tmp_path / "my store"
        store_model(store, model_id, recommender=recommender, watermark=watermark, **more)
        make_live(store, write_release(store, version, model_id))

    return release


@pytest.fixture
def run_main():
    """Run the step's command line with changed flags and settings, and return its exit code."""
    names = {each.name for each in fields(ExtractionSettings)}

    def run(flags: dict[str, str], **more: str) -> int:
        flags_of_run = {
            **flags,
            **{f"--{name.replace('_', '-')}": value for name, value in more.items()},
        }
        named = {
            name: flags_of_run.pop(flag)
            for name in names
            if (flag := f"--{name.replace('_', '-')}") in flags_of_run
        }
        flags_of_run.setdefault(
            "--settings",
            settings_text({f"extraction.{name}": value for name, value in named.items()}),
        )
        return main([f"{flag}={value}" for flag, value in flags_of_run.items()])

    return run


@pytest.fixture
def run_step(tmp_path, recommender):
    """Change settings of the recommender, and extract the whole lake or a window of it."""

    def run(lake, window=ALL, *, run="run", **settings) -> RawDataset:
        opened = folder_lake(lake) if isinstance(lake, Path) else lake
        folder = tmp_path / "wo rk" / run / "extraction"
        changed = with_sections(recommender, extraction=settings)
        return extract(opened, window, folder=folder, recommender=changed)

    return run
