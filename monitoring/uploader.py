"""Moves sealed archive files into the lake: `python -m monitoring.uploader --archive DIR --lake DIR`.

In: `<archive>/day=*/part-*.parquet`, which `monitoring.memory.archive` renames into place whole. Out: the same files
below the lake, and `<archive>/uploaded/<name>.json` as the proof that the trigger waits for. Which rows a file holds is
the archive's concern; reading the lake, extraction's. A bucket instead of a folder is a later issue.

The order that survives a kill: copied aside, flushed, checked by size and SHA-256, renamed; then the marker; then the
local file goes. Each step is repeated or skipped on the next pass.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from components.contracts.durable import fsync_path, sha256_file, write_whole
from components.contracts.errors import ContractError, TemporaryError
from monitoring.memory.archive import marker_path, no_checkpoint
from monitoring.settings import UploaderSettings, build_parser, read_settings

logger = logging.getLogger(__name__)

ENVIRONMENT_PREFIX = "EVERGREEN_UPLOADER_"


class Uploader:
    """Moves files from one archive to one lake."""

    def __init__(
        self,
        archive: Path,
        lake: Path,
        *,
        clock: Callable[[], float] = time.time,
        checkpoint: Callable[[str], None] = no_checkpoint,
    ) -> None:
        """Opens both folders; they are created where missing.

        Args:
            archive: The monitor's archive.
            lake: Where the files go.
            clock: Seconds since the epoch.
            checkpoint: Called with the name of each step that a crash may follow.
        """
        self._archive, self._lake, self._clock, self._checkpoint = archive, lake, clock, checkpoint
        for folder in (archive, lake):
            folder.mkdir(parents=True, exist_ok=True)

    def run_once(self) -> list[str]:
        """Moves every file that is sealed now, oldest name first; their names.

        Raises:
            TemporaryError: a file could not be copied; the others after it wait for the next pass.
        """
        names = sorted(p.relative_to(self._archive).as_posix() for p in self._archive.glob("day=*/part-*.parquet"))
        for name in names:
            try:
                self._move(name)
            except OSError as error:
                raise TemporaryError(f"{name} was not moved: {error}") from error
        return names

    def _move(self, name: str) -> None:
        source, target = self._archive / name, self._lake / name
        digest, num_bytes = sha256_file(source), source.stat().st_size
        if not target.exists() or sha256_file(target) != digest:
            self._copy(source, target, digest, num_bytes)
        fsync_path(target.parent)
        self._checkpoint("uploader.renamed")
        marker = {
            "name": name,
            "lake_uri": target.resolve().as_uri(),
            "num_bytes": num_bytes,
            "sha256": digest,
            "uploaded_at": self._clock(),
        }
        write_whole(marker_path(self._archive, name), json.dumps(marker, indent=2) + "\n")
        self._checkpoint("uploader.marked")
        source.unlink()
        fsync_path(source.parent)
        self._checkpoint("uploader.removed")
        logger.info("moved %s: %d bytes", name, num_bytes)

    def _copy(self, source: Path, target: Path, digest: str, num_bytes: int) -> None:
        if not target.parent.exists():
            target.parent.mkdir(parents=True)
            fsync_path(target.parent.parent)
        # One name per file, so a copy torn by a kill is overwritten, not left behind.
        aside = target.with_name(f".{target.name}.aside")
        shutil.copyfile(source, aside)
        fsync_path(aside)
        self._checkpoint("uploader.copied")
        if aside.stat().st_size != num_bytes or sha256_file(aside) != digest:
            aside.unlink()
            raise TemporaryError(f"{target.name} reads back otherwise than it was written, expected sha256 {digest}")
        os.rename(aside, target)


def run(uploader: Uploader, stop: threading.Event, interval_seconds: float) -> None:
    """Passes over the archive until `stop` is set, then once more; what fails waits for the next pass."""
    while not stop.wait(interval_seconds):
        try:
            uploader.run_once()
        except TemporaryError as error:
            logger.warning("pass ended early, next in %g s: %s", interval_seconds, error)
    uploader.run_once()


def main(argv: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    """Runs the uploader until SIGTERM or SIGINT; 0 stopped, 1 the last pass failed, 2 misuse."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    parser = build_parser(UploaderSettings, prog="python -m monitoring.uploader", description=__doc__.split("\n")[0])
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        settings = read_settings(UploaderSettings, parser, argv, environment, ENVIRONMENT_PREFIX)
        logger.info("moving %s to %s", settings.archive, settings.lake)
        run(Uploader(settings.archive, settings.lake), stop, settings.interval_seconds)
    except ContractError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except TemporaryError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
