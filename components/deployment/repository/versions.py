"""The version folders below one model's name in the repository, read: which are whole, and what lies in them.

Changing them is `repository`'s.
"""

from __future__ import annotations

import logging
from pathlib import Path
from tempfile import TemporaryDirectory

from components.deployment.graph.files import DATA_FILE, GRAPH_FILE, graph_sha256
from components.deployment.graph.parity import GoldenRows
from components.deployment.repository.files import GOLDEN_FILE, RECORD_FILE, FileRecord, VersionRecord
from components.runtime.durable import sha256_file
from components.runtime.errors import ContractError
from components.storage.objects import Objects

logger = logging.getLogger(__name__)


class VersionFolders:
    """`<name>/<version>/...` in `objects`."""

    def __init__(self, objects: Objects, name: str) -> None:
        self._objects = objects
        self._name = name
        self.uri = f"{objects.uri}/{name}"

    def sizes(self) -> dict[int, dict[str, int]]:
        """Bytes by file name, by version number, of everything that is there, whole or not."""
        found: dict[int, dict[str, int]] = {}
        for each in self._objects.list(f"{self._name}/"):
            _, folder, *rest = each.name.split("/")
            if rest and folder.isascii() and folder.isdigit() and folder == str(int(folder)):
                found.setdefault(int(folder), {})["/".join(rest)] = each.size
        return found

    def whole(self) -> list[int]:
        """Versions whose files are all there, with the sizes that they were written with, ascending."""
        whole = []
        for version, sizes in self.sizes().items():
            try:
                if RECORD_FILE in sizes and self.record(version).is_whole(sizes):
                    whole.append(version)
            except ContractError as error:
                logger.warning("passed over: %s", error)
        return sorted(whole)

    def record(self, version: int) -> VersionRecord:
        """What the version's record says.

        Raises:
            ContractError: there is no such version, or its record is damaged or another version's.
        """
        path = f"{self._name}/{version}/{RECORD_FILE}"
        stored = self._objects.read(path)
        if stored is None:
            raise ContractError(f"{self._objects.uri}/{path} is absent, expected in every version")
        record = VersionRecord.loads(stored.content, source=f"{self._objects.uri}/{path}")
        if record.version != version:
            raise ContractError(f"{self._objects.uri}/{path} is about version {record.version}, expected {version}")
        return record

    def golden_rows(self, version: int) -> GoldenRows:
        """The version's golden rows.

        Raises:
            ContractError: they are absent or damaged.
        """
        expected = self.record(version).files[GOLDEN_FILE]
        with TemporaryDirectory(prefix="evergreen-golden-") as scratch:
            return GoldenRows.load(self._checked_file(version, GOLDEN_FILE, expected, Path(scratch)))

    def graph_sha256(self, version: int) -> str:
        """Hash of the version's graph, from its bytes and not from its record."""
        files = [file for file in (GRAPH_FILE, DATA_FILE) if file in self.record(version).files]
        with TemporaryDirectory(prefix="evergreen-graph-") as scratch:
            paths = [self._file(version, file, Path(scratch)) for file in files]
            return graph_sha256(paths[0].parent)

    def download_graph(self, version: int, folder: Path) -> None:
        """Puts the graph's files into the local `folder`.

        Raises:
            ContractError: there is no such version, or its graph is damaged.
        """
        record = self.record(version)
        for file in (GRAPH_FILE, DATA_FILE):
            if file in record.files:
                self._objects.download(f"{self._name}/{version}/{file}", folder / file)
        found = graph_sha256(folder)
        if found != record.graph_sha256:
            raise ContractError(f"graph of {self.uri}/{version} has sha256 {found}, expected {record.graph_sha256}")

    def check(self, version: int) -> None:
        """Returns if every file is byte for byte what the record says.

        Raises:
            ContractError: a file is damaged or absent; names it and both hashes.
        """
        for file, expected in self.record(version).files.items():
            with TemporaryDirectory(prefix="evergreen-check-") as scratch:
                self._checked_file(version, file, expected, Path(scratch))

    def _checked_file(self, version: int, file: str, expected: FileRecord, folder: Path) -> Path:
        path = self._file(version, file, folder)
        found = sha256_file(path)
        if found != expected.sha256:
            raise ContractError(f"{self.uri}/{version}/{file} has sha256 {found}, expected {expected.sha256}")
        return path

    def _file(self, version: int, file: str, folder: Path) -> Path:
        """A file of the version on this machine: itself where it is here, else a copy in `folder`."""
        path = f"{self._name}/{version}/{file}"
        local = self._objects.local(path)
        if local is not None and local.is_file():
            return local
        self._objects.download(path, folder / file)
        return folder / file
