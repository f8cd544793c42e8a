"""Lakes in folders and in the emulated bucket `models`, and counts of fetches."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from components.extraction.__main__ import main
from components.extraction.extract import extract
from components.extraction.lake import Lake
from components.extraction.lake_files import LakeFiles, opened_lake
from components.extraction.reader import RowReader, SortedRows
from evergreen.config.features import Features
from evergreen.config.spec import Recommender
from evergreen.contracts import raw_rows
from evergreen.contracts.manifests import RawDataset
from evergreen.rows.archived_rows import arrow_schema
from evergreen.rows.raw_schema import MalformedRows
from evergreen.rows.times import TimeSpan
from evergreen.storage.bucket import BucketObjects
from evergreen.storage.folder import FolderObjects
from evergreen.storage.uris import local_path
from testing.recommenders import SHOP, accept_into, with_sections

URI = "gs://models/a lake"
ALL = TimeSpan()
OUTCOMES = arrow_schema(raw_rows.OUTCOME_TYPES)


def folder_lake(folder: Path, **settings) -> Lake:
    """Open the lake in a folder with its current files."""
    return Lake(files=LakeFiles(FolderObjects(folder)), **settings)


def read_window(
    lake: Lake,
    malformed: MalformedRows,
    window: TimeSpan = ALL,
    *,
    features: Features = SHOP.features,
) -> Iterator[SortedRows]:
    """Yield the rows of a window of the lake."""
    plan = lake.plan(window)
    reader = RowReader(features=features, clicks=plan.late_clicks)
    yield from reader.tables(plan.chunks, malformed)


def open_storage(uri: str, **settings) -> BucketObjects:
    """Open a bucket with short timeouts."""
    return BucketObjects(uri, **{"retry_seconds": 20.0, "first_delay_seconds": 0.001, **settings})


def put(folder: Path, uri: str = URI) -> None:
    """Upload the folder's files as the objects below `uri`."""
    objects = open_storage(uri)
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != ".objects.lock"):
        objects.write(path.relative_to(folder).as_posix(), path)


def extract_lake(
    uri: str,
    work: Path,
    window,
    *,
    run: str = "run",
    opened=None,
    recommender: Recommender = SHOP,
    **settings,
) -> RawDataset:
    """Run the extraction step as a function. `opened` contains settings for `opened_lake`."""
    more = {"open_storage": open_storage, **(opened or {})} if uri.startswith("gs://") else {}
    with opened_lake(uri, work=work, **more) as files:
        return extract(
            Lake(files=files),
            window,
            folder=work / run / "extraction",
            recommender=with_sections(recommender, extraction=settings),
        )


def extract_by_command(
    folder: Path,
    lake: Path,
    *,
    run: str = "run",
    start: str = "",
    recommender: Recommender = SHOP,
    **settings,
) -> RawDataset:
    """Run the extraction step as a command, with a registry in `folder`.

    All outputs of the step are below `folder`.
    """
    accept_into(folder / "store", with_sections(recommender, extraction=settings))
    flags = {
        "run": run,
        "store": folder / "store",
        "work": folder / "work",
        "lake": lake,
        "window-start": start,
    }
    flags["output"] = folder / f"{run}.json"
    assert main([f"--{name}={value}" for name, value in flags.items()]) == 0
    return RawDataset.read(folder / f"{run}.json")


def fetched(seen) -> Counter:
    """Count how often each object was fetched, by its name within the lake.

    Version markers are not counted, because readers read them without a fetch.
    """
    names = [request.name.removeprefix("a lake/") for request in seen if request.is_download]
    return Counter(name for name in names if not name.endswith(raw_rows.VERSION_COMPLETE))


def is_fetch_of(name: str):
    """Return a predicate that selects the downloads of one object."""
    return lambda request: request.is_download and request.name == f"a lake/{name}"


def cached(work: Path) -> dict[str, list[str]]:
    """Map each object to the generations in the cache below `work`.

    Unfinished downloads have names with the suffix .part.
    """
    (cache,) = (work / ".lake-cache").iterdir()
    found: dict[str, list[str]] = {}
    for path in sorted(p for p in (cache / "objects").rglob("*") if p.is_file()):
        generation, _, name = path.relative_to(cache / "objects").as_posix().partition("/")
        found.setdefault(name, []).append(generation)
    return found


def table_in(uri: str, *columns: str) -> pa.Table:
    """Return the rows of a folder of Parquet files in order. The default is all columns."""
    paths = sorted(local_path(uri).glob("*.parquet"))
    return pa.concat_tables([pq.ParquetFile(path).read(list(columns) or None) for path in paths])


def rows_in(*uris: str | None) -> list[dict]:
    """Return the rows of several folders of Parquet files, in order.

    None stands for an absent folder.
    """
    return [
        row
        for uri in uris
        if uri and any(local_path(uri).glob("*"))
        for row in table_in(uri).to_pylist()
    ]


def keys_in(*uris: str | None) -> list[tuple[str, int]]:
    """Return (request id, row) of the rows in the folders `uris`."""
    return [(row[raw_rows.REQUEST_ID], row[raw_rows.ROW]) for row in rows_in(*uris)]


def keys_of(table) -> list[tuple[str, int]]:
    """Return (request id, row) of a table's rows."""
    return list(zip(table[raw_rows.REQUEST_ID].to_pylist(), table[raw_rows.ROW].to_pylist()))
