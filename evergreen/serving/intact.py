"""Read the two stored copies of a version's files, and restore corrupt copies.

One copy is in Triton's repository, and the other copy is in the model registry. Each copy is
compared with the hashes in the version's `Release` and in its record in the repository. If one copy
is corrupt, the error message names this copy. The functions then use the intact copy, or replace
the corrupt copy by the intact copy.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from evergreen.contracts.manifests import Release
from evergreen.contracts.serving import CODE_FILE
from evergreen.registry.models import graph_folder, graph_sha256, release_path
from evergreen.runtime.durable import sha256_file
from evergreen.runtime.errors import ContractError
from evergreen.serving.parity import GoldenRows
from evergreen.serving.repository.model_repository import (
    GOLDEN_FILE,
    RECORD_FILE,
    FileRecord,
    ModelRepository,
    VersionFolders,
    VersionRecord,
    assemble,
)
from evergreen.serving.repository.triton_config import ServingOptions

logger = logging.getLogger(__name__)


def golden_rows(repository: ModelRepository, store: Path, version: int) -> GoldenRows:
    """Return the version's golden rows from the first intact copy.

    Raises:
        ContractError: no copy is intact. The message names the defect of each copy.
    """
    sources: list[Callable[[], GoldenRows]] = [
        partial(repository.published.golden_rows, version),
        partial(_stored_golden_rows, store, version),
        partial(repository.canary.golden_rows, version),
    ]
    problems: list[str] = []
    for read in sources:
        try:
            found = read()
        except (ContractError, OSError) as error:
            problems.append(str(error))
            continue
        for problem in problems:
            logger.warning("%s; another copy is used", problem)
        return found
    raise ContractError(
        f"no copy of the golden rows of version {version} is intact: {'; '.join(problems)}"
    )


def check_stored_copy(store: Path, release: Release) -> None:
    """Check the model registry's copy of the version against the hashes of its release.

    Raises:
        ContractError: a file is corrupt or absent. The message names the file and both hashes.
    """
    folder = graph_folder(store, release.version)
    found: dict[str, Callable[[], str]] = {
        "graph": lambda: graph_sha256(folder),
        "golden": lambda: sha256_file(folder / GOLDEN_FILE),
    }
    for name, hashed in found.items():
        expected = release.sha256.get(name)
        try:
            if expected is not None and (sha256 := hashed()) != expected:
                raise ContractError(f"{name} in {folder} has sha256 {sha256}, expected {expected}")
        except OSError as error:
            raise ContractError(f"{name} in {folder} cannot be read: {error.strerror}") from error


def find_corrupt(folders: VersionFolders, store: Path, version: int) -> list[str]:
    """Return one error message for each corrupt file in the two copies of a version."""
    release = Release.read(release_path(store, version))
    record, problem = _record_of(folders, release)
    problems = [problem] if problem else []
    if record:
        problems += _corrupt_files(folders, version, record.files, found=folders.hashes(version))
    if graph_folder(store, version).exists():
        try:
            check_stored_copy(store, release)
        except ContractError as error:
            problems.append(str(error))
    return problems


def heal(
    folders: VersionFolders, store: Path, version: int, *, options: ServingOptions
) -> list[str]:
    """Replace the corrupt files of a version by intact copies.

    The caller holds the repository's lock.

    Args:
        folders: Version folders in the repository.
        store: Folder of the model registry.
        version: Number of the version to repair.
        options: Serving options, used if the version's record is corrupt.

    Returns:
        Paths of the replaced files. The files in the repository come first, and the files in the
        registry follow.

    Raises:
        ContractError: both copies of a file are corrupt. The message names the corrupt files.
    """
    release = Release.read(release_path(store, version))
    # Repair the registry before the repository, because the repository is repaired from the
    # registry's copy, which must be complete.
    healed = _heal_stored(folders, store, release)
    return healed + _heal_published(folders, store, release, options=options)


def _heal_published(
    folders: VersionFolders, store: Path, release: Release, *, options: ServingOptions
) -> list[str]:
    version = release.version
    record, problem = _record_of(folders, release)
    found = folders.hashes(version)
    recorded = {file.name: file for file in record.files} if record else {}
    problems = (
        [problem] if problem else _corrupt_files(folders, version, recorded.values(), found=found)
    )
    if not problems:
        return []
    try:
        check_stored_copy(store, release)
    except ContractError as error:
        raise ContractError(f"{'; '.join(problems)}; the copy is corrupt too: {error}") from error
    made = assemble(version, graph_folder(store, version), record.options if record else options)
    fresh = VersionRecord.loads(_content(made.pop(RECORD_FILE)), source=RECORD_FILE)
    own = recorded.get(CODE_FILE)
    # Do not replace intact code that another release of Evergreen wrote. Corrupt code is replaced
    # by the current code.
    is_code_intact = own is not None and found.get(CODE_FILE) == own.sha256
    files = [
        own if own and is_code_intact and file.name == CODE_FILE else file for file in fresh.files
    ]
    corrupt = [file.name for file in files if found.get(file.name) != file.sha256]
    for name in corrupt:
        folders.replace(version, name, made[name])
    if (whole := replace(fresh, files=files)) != record:
        folders.replace(version, RECORD_FILE, whole.dumps())
        corrupt.append(RECORD_FILE)
    for each in problems:
        logger.error("%s; it was replaced by the model registry's copy", each)
    return [f"{folders.uri}/{version}/{name}" for name in corrupt]


def _heal_stored(folders: VersionFolders, store: Path, release: Release) -> list[str]:
    """Replace corrupt files in the model registry by intact files from the repository."""
    folder = graph_folder(store, release.version)
    record, _ = _record_of(folders, release)
    if record is None or not folder.exists():  # `evergreen admin collect` removes the folder
        return []
    found, healed = folders.hashes(release.version), []
    for file in record.files:
        path = folder / file.name
        if file.name == CODE_FILE or found.get(file.name) != file.sha256:
            continue
        if not path.is_file() or sha256_file(path) != file.sha256:
            logger.error("%s is corrupt; it is replaced by the repository's copy", path)
            folders.fetch(release.version, file.name, path)
            healed.append(str(path))
    return healed


def _record_of(
    folders: VersionFolders, release: Release
) -> tuple[VersionRecord | None, str | None]:
    """Return the version's record.

    If the record does not belong to the released graph, return None and an error.
    """
    try:
        record = folders.record(release.version)
    except ContractError as error:
        return None, str(error)
    if record.graph_sha256 != (expected := release.sha256["graph"]):
        name = f"{folders.uri}/{release.version}/{RECORD_FILE}"
        return None, f"{name} is about a graph of sha256 {record.graph_sha256}, expected {expected}"
    return record, None


def _stored_golden_rows(store: Path, version: int) -> GoldenRows:
    path = graph_folder(store, version) / GOLDEN_FILE
    rows = GoldenRows.load(path)
    expected = Release.read(release_path(store, version)).sha256.get("golden")
    if expected is not None and (found := sha256_file(path)) != expected:
        raise ContractError(f"{path} has sha256 {found}, expected {expected}")
    return rows


def _corrupt_files(
    folders: VersionFolders, version: int, files: Iterable[FileRecord], *, found: Mapping[str, str]
) -> list[str]:
    return [
        f"{folders.uri}/{version}/{file.name} has sha256 {found.get(file.name)}, expected "
        f"{file.sha256}"
        for file in files
        if found.get(file.name) != file.sha256
    ]


def _content(content: Path | bytes) -> bytes:
    return content.read_bytes() if isinstance(content, Path) else content
