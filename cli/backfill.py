"""`evergreen data backfill` replaces a past day of the lake by a new version.

The rows of the given files become the rows of the day, in time order and without copies. The
earlier files of the day stay in the lake, but readers skip them (`lake_files`). The replaced rows
stay in the lake, and `lineage` shows which model saw which version. Rows keep only the columns of
the raw schema.

A writer first claims a version number, so that two writers never share a number. The writer then
writes the files. Finally, the writer writes a marker, which makes the version visible to readers.
Objects without a marker are not removed, because their writer may still be running slowly. After a
removal, a slow writer could publish a marker for absent files, and every reader would stop. Readers
therefore only log a warning about objects without a marker.
"""

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from cli.ingest import STORE_HELP, ReadCounts, read_rows, recommender_of
from components.extraction.copies import Copies
from components.extraction.lake_files import (
    FileEntry,
    VersionMarker,
    is_own_file,
    version_of_folder,
)
from components.extraction.reader import sorted_day
from components.extraction.spool import Spool
from evergreen.config.extraction import ExtractionSettings
from evergreen.config.spec import Recommender
from evergreen.contracts.raw_rows import DAY_PARTITION, VERSION_COMPLETE, VERSION_PARTITION
from evergreen.rows.forms import RawReader, click_log_files, find_reader
from evergreen.rows.raw_schema import MalformedRows, PartWriter, lake_schema
from evergreen.rows.times import DAY_MICROS, day_span, parse_day
from evergreen.runtime.errors import ContractError, PermanentError
from evergreen.runtime.exit_codes import exits_with_code
from evergreen.runtime.flags import CommandParser, add_store_flag, whoami
from evergreen.runtime.plain_text import log_as_text
from evergreen.storage.objects import ABSENT, Changed
from evergreen.storage.uris import is_bucket_uri, local_path, open_objects, typed_uri

logger = logging.getLogger(__name__)

MALFORMED_FILE = "_malformed_rows.jsonl"
"""File of malformed rows in the version's folder. The file's name begins with an underscore, so
readers ignore the file."""
CLAIM = "_CLAIM"
"""Object in a version's folder that a writer creates to claim the version. The object is a JSON
document with the writer's name and the time, for debugging."""


class Backfilled(NamedTuple):
    """Result of a backfill."""

    version: int
    num_rows: int
    num_malformed: int
    num_duplicates: int
    """Same as `RawDataset.num_duplicates`. `num_updated` and `num_conflicting` are defined there
    too."""
    num_updated: int
    num_conflicting: int
    replaces: list[str]
    """Names of the earlier files of the day, which readers skip from now on."""


def backfill(
    files: list[Path], recommender: Recommender, *, lake: str, day: date, reason: str = ""
) -> Backfilled:
    """Write the rows of `files` as the day's next version.

    Rows that are in the raw schema keep their times. Rows without times are spread evenly over the
    day in the order of `files`. Rows of another day count as malformed. If two processes backfill a
    day at the same time, both versions are written, and readers use the higher version.

    Args:
        files: Files of rows. Either all files are in the raw schema, or no file is.
        recommender: The recommender that describes the files' rows.
        lake: URI or absolute path of an existing lake.
        day: The UTC day to replace.
        reason: Text for people, stored in the version's marker.

    Raises:
        ContractError: a file is corrupt, has an unknown format or has too many malformed rows. This
            error is also raised if only some files are in the raw schema, or if no valid row
            remains.
        TemporaryError: the bucket cannot be reached.
        PermanentError: there is no permission, no bucket or no disk space, or files of the version
            were removed meanwhile.
    """
    versions = DayVersions(lake, day)
    limits = recommender.section("extraction", ExtractionSettings)
    # List these files before any row is read. Readers must not skip files that arrive later,
    # because these files contain rows without the correction.
    replaces = versions.own_files()
    with tempfile.TemporaryDirectory(prefix="backfill-", ignore_cleanup_errors=True) as folder:
        scratch, rows = Path(folder), Path(folder, "rows")
        with (
            MalformedRows(
                scratch / MALFORMED_FILE, max_fraction=limits.max_malformed_fraction
            ) as malformed,
            PartWriter(rows) as writer,
        ):
            copies = Copies()
            for table, left_out in _day_rows(
                files, recommender, day, malformed=malformed, scratch=scratch
            ):
                copies.add(left_out)
                writer.write(table)
            malformed.check()
        num_rows = sum(part.num_rows for part in writer.parts)
        copies.check(num_rows, max_fraction=limits.max_conflicting_fraction, source=f"day {day}")
        if not num_rows:
            raise ContractError(
                f"{files[0]} and the other files have no row of {day}, expected at least one row"
            )
        if malformed.num_rows:
            malformed.path.rename(rows / MALFORMED_FILE)
        version = versions.claim()
        marker = VersionMarker(
            day=str(day),
            version=version,
            files=[FileEntry.of(part.path) for part in writer.parts],
            replaces=replaces,
            num_rows=num_rows,
            created_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            reason=reason,
        )
        versions.publish(rows, marker)
    logger.info("%s of %s is now version %d: %d rows", day, lake, version, num_rows)
    return Backfilled(
        version=version,
        num_rows=num_rows,
        num_malformed=malformed.num_rows,
        num_duplicates=copies.num_equal,
        num_updated=copies.num_updated,
        num_conflicting=copies.num_conflicting,
        replaces=[mark.name for mark in replaces],
    )


class DayVersions:
    """Versions of one day of a lake, with a writer for the next version.

    `lake` is a URI or an absolute path.

    Raises:
        ContractError: the lake does not exist.
    """

    def __init__(self, lake: str, day: date) -> None:
        self._objects, self._partition = open_objects(lake), DAY_PARTITION.format(day=day)
        if not is_bucket_uri(lake) and not local_path(lake).is_dir():
            raise ContractError(
                f"lake {local_path(lake)} does not exist, expected a folder of day partitions"
            )
        listed = self._objects.list(f"{self._partition}/")
        if is_bucket_uri(lake) and not listed and not self._objects.list():
            raise ContractError(f"lake {lake} contains no object, expected day partitions")
        self._listed = {info.name.removeprefix(f"{self._partition}/"): info.size for info in listed}

    def own_files(self) -> list[FileEntry]:
        """Return the day's files that were not written by a backfill (version 0)."""
        return [FileEntry(name, size) for name, size in self._listed.items() if is_own_file(name)]

    def claim(self) -> int:
        """Claim and return the next free version number."""
        version = max(
            (version_of_folder(name.partition("/")[0]) for name in self._listed), default=0
        )
        claim = {"by": whoami(), "at": datetime.now(timezone.utc).isoformat(timespec="seconds")}
        while True:
            version += 1
            try:
                content = json.dumps(claim).encode()
                self._objects.write(
                    f"{self._folder(version)}/{CLAIM}", content, if_generation=ABSENT
                )
            except Changed:
                continue
            return version

    def publish(self, rows: Path, marker: VersionMarker) -> None:
        """Publish the files of the folder `rows` as the version that the marker describes.

        Raises:
            PermanentError: files of the version were removed or changed while it was written.
        """
        folder, paths = self._folder(marker.version), sorted(rows.iterdir())
        for path in paths:
            self._objects.upload(f"{folder}/{path.name}", path)
        found = {info.name: info.size for info in self._objects.list(f"{folder}/")}
        if lacking := [
            p.name for p in paths if found.get(f"{folder}/{p.name}") != p.stat().st_size
        ]:
            raise PermanentError(
                f"{self._objects.uri}/{folder}: {', '.join(lacking)} were removed or changed while "
                "the version was written, so readers skip this version"
            )
        content = marker.to_json().encode()
        self._objects.write(f"{folder}/{VERSION_COMPLETE}", content, if_generation=ABSENT)

    def _folder(self, version: int) -> str:
        return f"{self._partition}/{VERSION_PARTITION.format(version=version)}"


def _day_rows(
    files: list[Path],
    recommender: Recommender,
    day: date,
    *,
    malformed: MalformedRows,
    scratch: Path,
) -> Iterator[tuple[Any, Copies]]:
    """Read the day's rows in time order.

    Yields chunks of bounded size, each with a description of the dropped copies.
    """
    readers = [find_reader(path, recommender) for path in files]
    raw = [isinstance(reader, RawReader) for reader in readers]
    if timed := [
        reader.path for reader in readers if reader.has_times and not isinstance(reader, RawReader)
    ]:
        raise ContractError(
            f"{timed[0]} has event times but not the raw schema, expected files in the raw schema; "
            "`evergreen data ingest` converts the file into another lake"
        )
    if any(raw) and not all(raw):
        raise ContractError(
            f"{files[raw.index(True)]} has event times, {files[raw.index(False)]} has none; "
            "expected files of one kind"
        )
    weighted = recommender.data.has_weights
    if not any(raw):
        spool = Spool(scratch, features=recommender.features, weighted=weighted)
        for batch in read_rows(files, recommender, malformed, counts=ReadCounts()):
            spool.write(batch)
        start = day_span(day).start
        assert start is not None
        with spool.close() as events:
            yield (
                lake_schema(recommender.features, weighted=weighted).empty_table(),
                events.counts().copies,
            )
            for batch in events.spread(start=start, length=DAY_MICROS):
                yield batch, Copies()
        return
    yield from sorted_day(
        files, day, features=recommender.features, malformed=malformed, weighted=weighted
    )


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags."""
    parser = CommandParser(
        prog="evergreen data backfill",
        description="Write the rows of files (raw Parquet of the day, or files without times) as "
        "the next version of a day of the lake. Readers use the newest complete version, and files "
        "that came to the day after it was written. The counts are printed as JSON.",
    )
    add_store_flag(parser, text=STORE_HELP)
    parser.add_argument("--lake", required=True, help="lake: folder, file:// or gs:// URI")
    parser.add_argument("--day", required=True, help="the day, UTC, YYYY-MM-DD")
    parser.add_argument("--reason", default="", help="reason, stored in the version's marker")
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="a file, or a folder of files"
    )
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. `evergreen.runtime.exit_codes` lists its exit codes."""
    arguments = build_parser().parse_args(argv)
    log_as_text()
    files = [file for path in arguments.files for file in click_log_files(path)]
    done = backfill(
        files,
        recommender_of(arguments.store),
        lake=typed_uri(arguments.lake),
        day=parse_day("day", arguments.day),
        reason=arguments.reason,
    )
    print(json.dumps({"day": arguments.day, **done._asdict()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
