"""Lakes that are put into the emulated bucket `models`, beside the folder that they came from; and what was fetched."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from components.contracts.manifests import RawDataset
from components.extraction.extract import ExtractionSettings, extract
from components.extraction.lake_folder import opened_lake
from components.extraction.source import find_source
from components.storage.bucket import BucketObjects

URI = "gs://models/a lake"


def open_storage(uri: str, **settings) -> BucketObjects:
    """Storage with little patience."""
    return BucketObjects(uri, **{"retry_seconds": 20.0, "first_delay_seconds": 0.001, **settings})


def put(folder: Path, uri: str = URI) -> None:
    """Makes the folder's files the objects below `uri`."""
    objects = open_storage(uri)
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != ".objects.lock"):
        objects.write(path.relative_to(folder).as_posix(), path)


def extract_lake(uri: str, work: Path, window, *, run: str = "run", opened=None, **settings) -> RawDataset:
    """The step without its command line; `opened` are settings of the mirror."""
    settings = ExtractionSettings(**settings)
    more = {"open_storage": open_storage, **(opened or {})} if uri.startswith("gs://") else {}
    with opened_lake(uri, work=work, **more) as lake:
        lake.fetch(window, replay_days=settings.replay_days)
        folder = work / run / "extraction"
        return extract(find_source(lake.path), window, folder, settings, source_uri=lake.uri, named=lake.named)


def fetched(seen) -> Counter:
    """How often each object was asked for, by its name within the lake."""
    return Counter(request.name.removeprefix("a lake/") for request in seen if request.is_download)


def is_fetch_of(name: str):
    """Picks the downloads of one object."""
    return lambda request: request.is_download and request.name == f"a lake/{name}"


def cached(work: Path) -> dict[str, list[str]]:
    """Generations that the one cache below `work` holds, by object; those that are not whole end in .part."""
    (cache,) = (work / ".lake-cache").iterdir()
    found: dict[str, list[str]] = {}
    for path in sorted(p for p in (cache / "objects").rglob("*") if p.is_file()):
        found.setdefault(path.parent.relative_to(cache / "objects").as_posix(), []).append(path.name)
    return found


def views(work: Path) -> list[str]:
    """What lies where the views of running processes do."""
    (cache,) = (work / ".lake-cache").iterdir()
    return sorted(path.name for path in (cache / "views").iterdir())


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Waits for the condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to this"
        time.sleep(0.02)
