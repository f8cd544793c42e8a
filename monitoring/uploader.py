"""Move sealed archive files to the lake: `python -m monitoring.uploader --archive DIR --lake DIR`.

The input is `<archive>/day=*/part-*.parquet` and `<archive>/outcomes/day=*/part-*.parquet`, which
`monitoring.state` renames into place when they are complete. The output is files of the same names
in the lake, which is a folder or a `gs://` bucket. Each moved file gets a marker
`<archive>/uploaded/<name>.json`. A retrain request waits until the files that it needs have
markers. `evergreen.storage` stores the bytes and verifies them.

A kill between any two steps loses no file. First, the file is stored in the lake and compared with
the local file. The marker is written next, and the local file is removed last. The next pass of any
uploader repeats or skips each step.
"""

import argparse
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path

from evergreen.config import reader
from evergreen.config.reader import read_settings
from evergreen.contracts.raw_rows import DAY_PARTITION, OUTCOME_PARTITION
from evergreen.runtime.durable import fsync_path, no_checkpoint, sha256_file, write_whole
from evergreen.runtime.errors import ContractError, PermanentError, Refused, TemporaryError, expect
from evergreen.runtime.exit_codes import ExitCode, exits_with_code
from evergreen.runtime.plain_text import FORMATS, TEXT, configure_logging
from evergreen.storage.folder import FolderObjects
from evergreen.storage.objects import Differs, Objects
from evergreen.storage.uris import is_bucket_uri, local_path, open_objects, typed_uri
from monitoring.state.archive import UPLOADED_FOLDER, marker_path

logger = logging.getLogger(__name__)

ENVIRONMENT_PREFIX = "EVERGREEN_UPLOADER_"
MAX_PAUSE_SECONDS = 300.0
"""Maximum pause between two passes while the lake is unreachable."""
_PATTERNS = tuple(
    f"{partition.format(day='*')}/part-*.parquet"
    for partition in (DAY_PARTITION, OUTCOME_PARTITION)
)


@dataclass(frozen=True, kw_only=True)
class UploaderSettings:
    """Settings of one uploader process."""

    archive: Path
    """Archive folder of the monitor."""
    lake: str
    """Destination of sealed files: a folder, or gs://bucket/prefix. The files are written to
    subfolders `day=YYYY-MM-DD/`."""
    interval_seconds: float = 5.0
    """Pause between two passes over the archive, in seconds. The pause grows to 5 minutes while the
    lake is unreachable."""
    once: bool = False
    """Move the sealed files once and exit, for example in a CronJob. If False, the uploader runs
    until SIGTERM."""
    log_format: str = TEXT
    """Format of log lines on standard error: `text` for people, `json` for a log collector."""

    def __post_init__(self) -> None:
        expect(self, "above 0", lambda value: value > 0, "interval_seconds")
        expect(self, f"one of {', '.join(FORMATS)}", lambda value: value in FORMATS, "log_format")
        if is_bucket_uri(self.lake_uri):
            return
        try:
            folder = local_path(self.lake_uri)
        except ContractError as error:
            raise ContractError(
                f"lake is {self.lake!r}, expected a folder or gs://bucket/prefix"
            ) from error
        if self.archive.resolve() == folder.resolve():
            raise ContractError(f"lake is {self.lake}, expected another folder than the archive")

    @property
    def lake_uri(self) -> str:
        """The lake as `storage.uris.open_objects` expects it.

        A relative path is relative to the working folder.
        """
        return typed_uri(self.lake)


class _Unreadable(TemporaryError):
    """An archive file cannot be read. All other files are moved."""


def _read(source: Path) -> tuple[str, int]:
    """Return SHA-256 and size of a file."""
    try:
        return sha256_file(source), source.stat().st_size
    except OSError as error:
        raise _Unreadable(f"{source} cannot be read: {error.strerror}") from error


class Uploader:
    """Moves files from one archive to one lake."""

    def __init__(
        self,
        archive: Path,
        lake: Path | Objects,
        *,
        clock: Callable[[], float] = time.time,
        checkpoint: Callable[[str], None] = no_checkpoint,
    ) -> None:
        """Open the archive and the lake, and create a missing folder.

        `checkpoint` is called with the name of each step that a crash may follow.
        """
        self._archive, self._clock, self._checkpoint = archive, clock, checkpoint
        self._lake = FolderObjects(lake) if isinstance(lake, Path) else lake
        (archive / UPLOADED_FOLDER).mkdir(parents=True, exist_ok=True)
        # Without this flush, a power cut could remove the first markers after the local files were
        # deleted.
        fsync_path(archive)
        if isinstance(self._lake, FolderObjects):
            self._lake.root.mkdir(parents=True, exist_ok=True)
        self._failed: set[str] = set()
        self.refused: dict[str, str] = {}
        """Error message by archive file, for files that exist in the lake with other bytes. The
        refused files stay in the archive, and the uploader does not retry them."""

    def run_once(self) -> list[str]:
        """Move the files that are sealed now, and return their names.

        Rows come before outcomes, older days before newer days, and files that were sealed earlier
        before files that were sealed later. If a pipeline run reads the lake at the same time, the
        next run begins after the newest row that this run found. Rows that arrive later than newer
        rows are used for training only within `late_days` days. Files that failed in an earlier
        pass come last, so that one bad file does not block the other files.

        A file that cannot be read, or that exists in the lake with other bytes (`Differs`, see
        `refused`), is skipped. The error for such files is raised after all other files were moved.

        Raises:
            TemporaryError: A file could not be moved now, and the files after it wait for the next
                pass. The error is also raised if some files cannot be read.
            PermanentError: No file can be moved until somebody fixes a permission, the disk space
                or the bucket. The remaining files stay in the archive. The error is also raised if
                some files exist in the lake with other bytes.
        """
        moved: list[str] = []
        differing: list[Differs] = []
        unreadable: list[str] = []
        found = [
            p.relative_to(self._archive).as_posix()
            for pattern in _PATTERNS
            for p in self._archive.glob(pattern)
        ]
        for name in sorted(set(found) - self.refused.keys(), key=self._upload_order):
            try:
                if self._move(name):
                    moved.append(name)
            except Differs as error:
                logger.error("%s is not moved and stays in the archive: %s", name, error)
                self.refused[name] = str(error)
                differing.append(error)
            except _Unreadable as error:
                logger.error("%s is unreadable and stays in the archive: %s", name, error)
                self._failed.add(name)
                unreadable.append(str(error))
                continue
            except (TemporaryError, OSError) as error:
                self._failed.add(name)
                raise TemporaryError(f"{name} was not moved: {error}") from error
            except PermanentError as error:
                raise PermanentError(
                    f"{name} and the files sealed after it were not moved: {error}"
                ) from error
            self._failed.discard(name)
        if differing:
            raise differing[0]
        if unreadable:
            first = "; ".join(unreadable[:3])
            raise TemporaryError(f"{len(unreadable)} unreadable files were not moved: {first}")
        return moved

    def _upload_order(self, name: str) -> tuple[bool, str, float, str]:
        try:
            sealed_at = (self._archive / name).stat().st_mtime
        except OSError:
            sealed_at = (
                inf  # another uploader has just moved the file, or `_move` reports the error
            )
        return name in self._failed, name.rpartition("/")[0], sealed_at, name

    def _move(self, name: str) -> bool:
        """Move the file. Returns False if another uploader has already moved the file."""
        source = self._archive / name
        try:
            digest, num_bytes = _read(source)
            self._lake.upload(name, source)
        except (PermanentError, TemporaryError, OSError):
            # A missing file is not an error if another uploader left its marker.
            if not source.exists() and marker_path(self._archive, name).exists():
                return False
            raise
        self._checkpoint("uploader.stored")
        marker = {
            "name": name,
            "lake_uri": self._lake_uri(name),
            "num_bytes": num_bytes,
            "sha256": digest,
            "uploaded_at": self._clock(),
        }
        write_whole(marker_path(self._archive, name), json.dumps(marker, indent=2) + "\n")
        self._checkpoint("uploader.marked")
        source.unlink(missing_ok=True)
        fsync_path(source.parent)
        self._checkpoint("uploader.removed")
        logger.info("moved %s: %d bytes", name, num_bytes)
        return True

    def _lake_uri(self, name: str) -> str:
        local = self._lake.local(name)
        return f"{self._lake.uri}/{name}" if local is None else local.resolve().as_uri()


def run(uploader: Uploader, stop: threading.Event, interval_seconds: float) -> None:
    """Run passes over the archive until `stop` is set, and then one last pass.

    A file that fails temporarily waits for a later pass.

    Raises:
        TemporaryError: The last pass failed.
        PermanentError: See `Uploader.run_once`. A file that exists in the lake with other bytes
            does not end the loop.
    """
    pause = interval_seconds
    while not stop.wait(pause):
        try:
            uploader.run_once()
            pause = interval_seconds
        except Differs:
            continue  # `run_once` has logged the error, and `run` raises it at the end
        except TemporaryError as error:
            pause = min(2 * pause, max(interval_seconds, MAX_PAUSE_SECONDS))
            logger.warning(
                "a pass over the archive failed, and is repeated in %g s: %s", pause, error
            )
    uploader.run_once()


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the uploader's settings."""
    return reader.build_parser(
        UploaderSettings, prog="evergreen monitor upload", description=__doc__.split("\n")[0]
    )


@exits_with_code
def main(argv: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    """Run the uploader until SIGTERM or SIGINT, or once."""
    parser = build_parser()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    settings = read_settings(
        UploaderSettings,
        parser.parse_args(argv),
        environment=environment,
        prefix=ENVIRONMENT_PREFIX,
    )
    configure_logging(settings.log_format)
    uploader = Uploader(settings.archive, open_objects(settings.lake_uri))
    logger.info("moving %s to %s", settings.archive, settings.lake)
    if settings.once:
        stop.set()
    with suppress(Differs):  # `Differs` is raised below, once for all refused files
        run(uploader, stop, settings.interval_seconds)
    if uploader.refused:
        raise Refused(
            "; ".join(
                f"{name} stays in the archive: {reason}"
                for name, reason in uploader.refused.items()
            )
        )
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
