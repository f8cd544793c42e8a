"""The files of a version in the model repository, and the record by which a reader knows that all of them are there.

`version.json` names every file of the version with its size and SHA-256. A folder without it, or in which a file is
absent or of another size, is no version: the copy was interrupted. `VersionFolders` reads the versions below one
model's name; writing them, and which of them are served, is `model_repository`'s.
"""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from components.contracts.manifests import Manifest
from components.contracts.serving import CODE_FILE, PYTHON, named_inputs
from components.deployment.graph.parity import GoldenRows
from components.deployment.repository.triton_config import ServingOptions, WarmupRow
from components.runtime.durable import sha256_file
from components.runtime.errors import ContractError
from components.storage.downloads import download
from components.storage.objects import Objects
from components.store.models import DATA_FILE, GRAPH_FILE, graph_sha256

logger = logging.getLogger(__name__)

GOLDEN_FILE = "golden.npz"
RECORD_FILE = "version.json"
_SERVED_MODEL = Path(__file__).resolve().parents[1] / "served_model.py"


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """One file of a version."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class VersionRecord(Manifest):
    """The content of `version.json`."""

    version: int
    graph_sha256: str
    """See `store.models.graph_sha256`."""
    options: ServingOptions
    """What the version was staged for."""
    files: list[FileRecord]
    """Every file beside the record itself."""

    def __post_init__(self) -> None:
        if not {GRAPH_FILE, GOLDEN_FILE} <= (names := {file.name for file in self.files}):
            raise ContractError(f"names {sorted(names)}, expected {GRAPH_FILE} and {GOLDEN_FILE} among them")

    def is_whole(self, sizes: Mapping[str, int]) -> bool:
        """Whether files of these sizes (bytes by name) hold all that the record names."""
        return all(sizes.get(file.name) == file.bytes for file in self.files)


def assemble(version: int, folder: Path, options: ServingOptions) -> dict[str, Path | bytes]:
    """The files of a version by the names they get, made from a folder with a graph and its golden rows.

    The record is the last of them: until it is written, there is no version.
    """
    files = {name: folder / name for name in (GRAPH_FILE, DATA_FILE, GOLDEN_FILE) if (folder / name).exists()}
    if options.server == PYTHON:
        # A version without its code would make Triton's loader hang forever.
        files[CODE_FILE] = _SERVED_MODEL
    record = VersionRecord(
        version=version,
        graph_sha256=graph_sha256(folder),
        options=options,
        files=[
            FileRecord(name=name, bytes=path.stat().st_size, sha256=sha256_file(path)) for name, path in files.items()
        ],
    )
    return {**files, RECORD_FILE: record.dumps()}


def warmup_files(golden: GoldenRows, num_rows: int) -> tuple[list[WarmupRow], dict[str, bytes]]:
    """The first golden rows as Triton's warm-up reads them, and the content of each file that they name.

    Names are hashes of the content: a configuration that is restored finds the rows that it was written for.
    """
    rows: list[WarmupRow] = []
    contents: dict[str, bytes] = {}
    for at in range(min(num_rows, len(golden))):
        row = {}
        for tensor, values in named_inputs(golden.dense[at : at + 1], golden.categorical[at : at + 1]).items():
            content = values.astype(values.dtype.newbyteorder("<")).tobytes()
            row[tensor] = f"{tensor}-{hashlib.sha256(content).hexdigest()[:16]}"
            contents[row[tensor]] = content
        rows.append(row)
    return rows, contents


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
        """The version's record.

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
        """The rows that the version must answer as training did.

        Raises:
            ContractError: they are absent or damaged.
        """
        [expected] = [file for file in self.record(version).files if file.name == GOLDEN_FILE]
        with TemporaryDirectory(prefix="evergreen-golden-") as scratch:
            return GoldenRows.load(self._checked_file(version, expected, Path(scratch)))

    def graph_sha256(self, version: int) -> str:
        """Hash of the version's graph, from its bytes and not from its record."""
        names = {file.name for file in self.record(version).files}
        with TemporaryDirectory(prefix="evergreen-graph-") as scratch:
            paths = [
                self._local_file(version, name, Path(scratch)) for name in (GRAPH_FILE, DATA_FILE) if name in names
            ]
            return graph_sha256(paths[0].parent)

    def check(self, version: int) -> None:
        """Returns if every file has the hash in the record.

        Raises:
            ContractError: a file is damaged or absent; names it and both hashes.
        """
        for file in self.record(version).files:
            with TemporaryDirectory(prefix="evergreen-check-") as scratch:
                self._checked_file(version, file, Path(scratch))

    def _checked_file(self, version: int, file: FileRecord, folder: Path) -> Path:
        path = self._local_file(version, file.name, folder)
        if (found := sha256_file(path)) != file.sha256:
            raise ContractError(f"{self.uri}/{version}/{file.name} has sha256 {found}, expected {file.sha256}")
        return path

    def _local_file(self, version: int, file: str, folder: Path) -> Path:
        """A file of the version on this machine: itself where it is here, else a copy in `folder`."""
        path = f"{self._name}/{version}/{file}"
        local = self._objects.local(path)
        if local is not None and local.is_file():
            return local
        download(self._objects, path, folder / file)
        return folder / file
