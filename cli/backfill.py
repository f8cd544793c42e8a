"""Replaces a past day of the lake by a new version: `evergreen backfill`.

The day's rows become those of the given files, in time order and each once. The day's earlier files stay where they are
and are read no more (`lake_files`): nothing is lost, and `lineage` says which model saw which version. Rows keep the
columns of the raw schema alone.

A version's number is claimed first, so that two writers never share one; its files follow, and the marker that makes
readers see it is last. The objects of an interrupted writer are not removed: it cannot be known whether it is dead or
slow, and a marker that it wrote afterwards would name absent files, which stops every reader. Readers warn of them.
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

from cli.ingest import ReadCounts, add_store_flag, read_rows, recommender_of
from components.extraction.copies import Copies
from components.extraction.lake import sorted_day
from components.extraction.lake_files import FileMark, VersionMarker, is_own_file, version_of_folder
from components.extraction.spool import Spool
from evergreen.config.extraction import ExtractionSettings
from evergreen.config.spec import Recommender
from evergreen.contracts.raw_rows import DAY_PARTITION, VERSION_COMPLETE, VERSION_PARTITION
from evergreen.rows.forms import RawReader, click_log_files, find_reader
from evergreen.rows.raw_schema import MalformedRows, PartWriter, lake_schema
from evergreen.rows.times import DAY_MICROS, day_span, parse_day
from evergreen.runtime.errors import ContractError, PermanentError
from evergreen.runtime.exit_codes import exits_with_code
from evergreen.runtime.flags import CommandParser, whoami
from evergreen.runtime.plain_text import log_as_text
from evergreen.storage.objects import ABSENT, Changed
from evergreen.storage.uris import is_bucket_uri, local_path, open_objects, typed_uri

logger = logging.getLogger(__name__)

MALFORMED_FILE = "_malformed_rows.jsonl"
"""In the version's folder; the underscore hides it from readers."""
CLAIM = "_CLAIM"
"""Object in a version's folder by which a writer claims it: JSON with who and when, for people."""


class Backfilled(NamedTuple):
    """What was done."""

    version: int
    num_rows: int
    num_malformed: int
    num_duplicates: int
    """See `RawDataset.num_duplicates`, likewise the next two."""
    num_updated: int
    num_conflicting: int
    replaces: list[str]
    """Names of the files of version 0 that are read no more."""


def backfill(files: list[Path], recommender: Recommender, *, lake: str, day: date, reason: str = "") -> Backfilled:
    """Writes the rows of `files` as the day's next version.

    Rows in the raw schema keep their times and must be of the day; rows without times are spread evenly over it in the
    order of `files`. Of two simultaneous back-fills both are written, and the higher version counts. `files` are all in
    the raw schema, or none; the lake, a URI or an absolute path, must exist; `reason` is kept in the marker, for
    people. Rows of another day count as malformed.

    Raises:
        ContractError: a file is corrupt, of no known form or too malformed, forms are mixed, or no row is left.
        TemporaryError: the bucket cannot be reached.
        PermanentError: no permission, no bucket, or no room; or somebody removed files of the version meanwhile.
    """
    versions = DayVersions(lake, day)
    limits = recommender.section("extraction", ExtractionSettings)
    # Noted before any row is read: a file that arrives meanwhile holds rows that nobody has corrected.
    replaces = versions.own_files()
    with tempfile.TemporaryDirectory(prefix="backfill-", ignore_cleanup_errors=True) as folder:
        scratch, rows = Path(folder), Path(folder, "rows")
        with (
            MalformedRows(scratch / MALFORMED_FILE, max_fraction=limits.max_malformed_fraction) as malformed,
            PartWriter(rows) as writer,
        ):
            copies = Copies()
            for table, left_out in _day_rows(files, recommender, day, malformed=malformed, scratch=scratch):
                copies.add(left_out)
                writer.write(table)
            malformed.judge()
        num_rows = sum(part.num_rows for part in writer.parts)
        copies.judge(num_rows, max_fraction=limits.max_conflicting_fraction, source=f"day {day}")
        if not num_rows:
            raise ContractError(f"{files[0]} and the other files hold no row of {day}, expected some")
        if malformed.num_rows:
            malformed.path.rename(rows / MALFORMED_FILE)
        version = versions.claim()
        marker = VersionMarker(
            day=str(day),
            version=version,
            files=[FileMark.of(part.path) for part in writer.parts],
            replaces=replaces,
            num_rows=num_rows,
            created_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            reason=reason,
        )
        versions.publish(rows, marker)
    logger.info("%s of %s is version %d now: %d rows", day, lake, version, num_rows)
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
    """The versions of one day of a lake, and the writing of the next one.

    `lake` is as `backfill` takes it.

    Raises:
        ContractError: the lake does not exist.
    """

    def __init__(self, lake: str, day: date) -> None:
        self._objects, self._partition = open_objects(lake), DAY_PARTITION.format(day=day)
        if not is_bucket_uri(lake) and not local_path(lake).is_dir():
            raise ContractError(f"lake {local_path(lake)} does not exist, expected a folder of day partitions")
        listed = self._objects.list(f"{self._partition}/")
        if is_bucket_uri(lake) and not listed and not self._objects.list():
            raise ContractError(f"lake {lake} holds no object, expected day partitions")
        self._listed = {info.name.removeprefix(f"{self._partition}/"): info.size for info in listed}

    def own_files(self) -> list[FileMark]:
        """The files of version 0."""
        return [FileMark(name, size) for name, size in self._listed.items() if is_own_file(name)]

    def claim(self) -> int:
        """Takes the next free version number."""
        version = max((version_of_folder(name.partition("/")[0]) for name in self._listed), default=0)
        claim = {"by": whoami(), "at": datetime.now(timezone.utc).isoformat(timespec="seconds")}
        while True:
            version += 1
            try:
                content = json.dumps(claim).encode()
                self._objects.write(f"{self._folder(version)}/{CLAIM}", content, if_generation=ABSENT)
            except Changed:
                continue
            return version

    def publish(self, rows: Path, marker: VersionMarker) -> None:
        """Makes the files of the folder `rows` the marker's version.

        Raises:
            PermanentError: somebody removed or changed files of the version while it was written.
        """
        folder, paths = self._folder(marker.version), sorted(rows.iterdir())
        for path in paths:
            self._objects.upload(f"{folder}/{path.name}", path)
        found = {info.name: info.size for info in self._objects.list(f"{folder}/")}
        if lacking := [p.name for p in paths if found.get(f"{folder}/{p.name}") != p.stat().st_size]:
            raise PermanentError(
                f"{self._objects.uri}/{folder}: {', '.join(lacking)}: removed or changed while the version was "
                "written; it is not read"
            )
        content = marker.to_json().encode()
        self._objects.write(f"{folder}/{VERSION_COMPLETE}", content, if_generation=ABSENT)

    def _folder(self, version: int) -> str:
        return f"{self._partition}/{VERSION_PARTITION.format(version=version)}"


def _day_rows(
    files: list[Path], recommender: Recommender, day: date, *, malformed: MalformedRows, scratch: Path
) -> Iterator[tuple[Any, Copies]]:
    """Read the day's rows in time order, a bounded piece at a time, each with the copies that were left out."""
    readers = [find_reader(path, recommender) for path in files]
    raw = [isinstance(reader, RawReader) for reader in readers]
    if timed := [reader.path for reader in readers if reader.has_times and not isinstance(reader, RawReader)]:
        raise ContractError(
            f"{timed[0]} has event times and is not in the raw schema, expected files of a lake; `evergreen ingest` "
            "into another lake makes such files of it"
        )
    if any(raw) and not all(raw):
        raise ContractError(
            f"{files[raw.index(True)]} has event times, {files[raw.index(False)]} has none; expected files of one kind"
        )
    weighted = recommender.data.has_weights
    if not any(raw):
        spool = Spool(scratch, features=recommender.features, weighted=weighted)
        for batch in read_rows(files, recommender, malformed, counts=ReadCounts()):
            spool.write(batch)
        start = day_span(day).start
        assert start is not None
        with spool.close() as events:
            yield lake_schema(recommender.features, weighted=weighted).empty_table(), events.counts().copies
            for batch in events.spread(start=start, length=DAY_MICROS):
                yield batch, Copies()
        return
    yield from sorted_day(files, day, features=recommender.features, malformed=malformed, weighted=weighted)


def build_parser() -> argparse.ArgumentParser:
    """The command's flags; `--help` is its documentation."""
    parser = CommandParser(
        prog="evergreen backfill",
        description="Writes the rows of files (raw Parquet of the day, or files without times) as the next "
        "version of a day of the lake. Readers take the newest complete version, and beside it files that came to the "
        "day after it was written. Prints its counts as JSON.",
    )
    add_store_flag(parser)
    parser.add_argument("--lake", required=True, help="lake: folder, file:// or gs:// URI")
    parser.add_argument("--day", required=True, help="the day, UTC, YYYY-MM-DD")
    parser.add_argument("--reason", default="", help="why, kept in the version's marker")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a file, or a folder of files")
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; see `runtime.exit_codes` for its exit codes."""
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
