"""A recommender's part of Triton's model repository, in a folder or a bucket: versions, configuration, plan and lock.

Layout for a recommender called shop: `shop/config.pbtxt` and `shop/<version>/{model.onnx[, model.data], golden.npz[,
model.py], version.json}`, rows for the warm-up in `shop/warmup/`. A version is staged under another model's name
(`shop_candidate`, loadable for a rehearsal), compared byte for byte with what was meant, and moved to its place, where
no server reads it: **the one atomic write that publishes is config.pbtxt**, which names a version. A server that starts
in the middle thus loads what was published last. An interrupted copy is named by no configuration, its number is not
used again, and the next deployment removes it. Nothing here is shared with another recommender of the same repository.

Changes need `locked()`: the kernel's lock of a folder (flock, which cannot outlive a killed deployment; the filesystem
must have it), a lease in a bucket, which ends by itself. The configuration is written only over the one that the lock's
holder found: a holder whose lease ended unnoticed fails there. Notifying the servers is `switch`'s.

`version.json` names every file of its version with size and SHA-256. A folder without it, or in which a file is absent
or of another size, is no version: the copy was interrupted. `VersionFolders` reads the versions below one model's name.
"""

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from evergreen.contracts.manifests import Manifest
from evergreen.contracts.serving import CODE_FILE, CONFIG_FILE, PYTHON, ServedNames, named_inputs, versions_of
from evergreen.registry.models import DATA_FILE, GRAPH_FILE, graph_sha256
from evergreen.registry.traffic_plan import TrafficPlan, traffic_file
from evergreen.runtime.durable import READABLE, own_umask, sha256_file, whole_file
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError
from evergreen.serving.parity import GoldenRows
from evergreen.serving.repository.triton_config import (
    ServingOptions,
    WarmupRow,
    read_options,
    triton_config,
    warmup_files_of,
)
from evergreen.storage.folder import FolderObjects
from evergreen.storage.lease import Lease
from evergreen.storage.objects import ABSENT, Changed, Objects, download

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
    """See `registry.models.graph_sha256`."""
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

    def hashes(self, version: int) -> dict[str, str]:
        """Return the SHA-256 of each file of the version, from its bytes, by the file's name."""
        found = {}
        for name in self.sizes().get(version, {}):
            with TemporaryDirectory(prefix="evergreen-check-") as scratch:
                found[name] = sha256_file(self._local_file(version, name, Path(scratch)))
        return found

    def fetch(self, version: int, file: str, target: Path) -> None:
        """Copy a file of the version to `target` on this machine."""
        with TemporaryDirectory(prefix="evergreen-fetch-") as scratch:
            source = self._local_file(version, file, Path(scratch))
            with open(source, "rb") as content, whole_file(target) as copy:
                shutil.copyfileobj(content, copy)

    def replace(self, version: int, file: str, content: bytes | Path) -> None:
        """Write a file of the version anew, in one step for whoever reads it."""
        self._objects.write(f"{self._name}/{version}/{file}", content)

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


logger = logging.getLogger(__name__)

WARMUP_FOLDER = "warmup"
LEASE_SECONDS = 60.0


class ModelRepository:
    """The repository in `objects`, which is made at the first write.

    `holder` says who works here, for the errors of others (default: this process); `lease_seconds` is how long a
    bucket's lock outlives a killed holder.
    """

    def __init__(
        self,
        objects: Objects,
        names: ServedNames,
        *,
        holder: str | None = None,
        lease_seconds: float = LEASE_SECONDS,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.objects = objects
        self.names = names
        self.uri = objects.uri
        self.published = VersionFolders(objects, names.model)
        """Versions of the served model; named by the configuration or not."""
        self.staged = VersionFolders(objects, names.candidate)
        self.canary = VersionFolders(objects, names.canary)
        """Versions under the canary's name: one, or none."""
        self._holder = holder or f"process {os.getpid()} on {socket.gethostname()}"
        self._lease_seconds, self._clock, self._monotonic = lease_seconds, clock, monotonic
        self._check_lock: Callable[[], None] | None = None
        self._config_generation = ABSENT
        self._config = f"{names.model}/{CONFIG_FILE}"
        self._plan = traffic_file(names.model)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps the recommender's other deployments out; also the proof that the repository can be written.

        Raises:
            ContractError: the folder cannot be written; names the path.
            TemporaryError: another deployment is at work; names it.
        """
        lock = self._flock(self.objects.root) if isinstance(self.objects, FolderObjects) else self._lease()
        with lock as check:
            config = self.objects.read(self._config)
            self._config_generation = ABSENT if config is None else config.generation
            self._check_lock = check
            try:
                yield
            finally:
                self._check_lock = None

    @contextmanager
    def _lease(self) -> Iterator[Callable[[], None]]:
        lease = Lease(
            self.objects,
            f"{self.names.model}.lease",
            holder=self._holder,
            seconds=self._lease_seconds,
            clock=self._clock,
            monotonic=self._monotonic,
        )
        try:
            lease.acquire()
        except TemporaryError as error:
            raise TemporaryError(
                f"another deployment is at work in model repository {self.published.uri}: {error}"
            ) from error
        with lease.kept():
            yield lease.check

    @contextmanager
    def _flock(self, folder: Path) -> Iterator[Callable[[], None]]:
        before = own_umask(READABLE)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))
            descriptor = os.open(folder / f".{self.names.model}.lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ContractError(f"model repository {folder} is not writable: {error.strerror}") from error
        finally:
            own_umask(before)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                other = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "unknown"
                raise TemporaryError(
                    f"another deployment is at work in model repository {self.published.uri}: it is held by {other}"
                ) from error
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{self._holder}\n".encode(), 0)
            yield lambda: None
        finally:
            os.close(descriptor)

    def check_held(self) -> None:
        """Returns if the lock is still held.

        Raises:
            TemporaryError: a bucket's lease ended, or another deployment took it over.
        """
        assert self._check_lock is not None, "changes of the model repository need its lock"
        self._check_lock()

    def versions(self) -> list[int]:
        """Versions whose files are all there, ascending; named by the configuration or not."""
        return self.published.whole()

    def taken_numbers(self) -> list[int]:
        """Every version number of which anything is there, interrupted copies too, ascending."""
        return sorted(self.published.sizes())

    def stage(self, version: int, folder: Path, options: ServingOptions) -> None:
        """Copies a version, graph and golden rows in `folder`, under the candidate's name, and reads all of it back.

        Raises:
            PermanentError: what is read back is not what was written, or there is no room.
        """
        self.check_held()
        self._remove_interrupted()
        self.discard_candidate()
        for name, content in assemble(version, folder, options).items():
            self.objects.write(f"{self.names.candidate}/{version}/{name}", content, if_generation=ABSENT)
        # Triton's cache knows a model by name and number, not by its bytes: a rehearsal must not hear a predecessor.
        # One instance shows what a load can reveal, and each takes processor time from the version that serves.
        rehearsed = replace(options, response_cache=False, instances=1)
        golden = GoldenRows.load(folder / GOLDEN_FILE)
        self._write_loadable(self.names.candidate, version, golden=golden, options=rehearsed)
        try:
            self.staged.check(version)
        except ContractError as error:
            raise PermanentError(f"what was staged did not stay as it was written: {error}") from error

    def publish(self, version: int) -> None:
        """Moves the staged version to its place, where no server reads it until the configuration names it.

        Raises:
            ContractError: it is not staged whole, or its number is taken.
        """
        self.check_held()
        record = self.staged.record(version)
        prefix = f"{self.names.candidate}/{version}/"
        for each in self.objects.list(prefix):
            # A rehearsal's Python leaves its cache.
            if each.name.removeprefix(prefix) not in {RECORD_FILE, *(file.name for file in record.files)}:
                self.objects.delete(each.name)
        self.objects.move(f"{self.names.candidate}/{version}", f"{self.names.model}/{version}")
        if version not in self.versions():
            raise PermanentError(f"version {version} did not arrive whole in {self.published.uri}")
        self.discard_candidate()

    def discard_candidate(self) -> None:
        """Removes what is staged, if anything."""
        self._remove_model(self.names.candidate)

    def withdraw(self, version: int) -> None:
        """Removes a version; from its first step on it counts as interrupted.

        Raises:
            ContractError: the configuration names it.
        """
        self.check_held()
        if version in self._named():
            raise ContractError(f"version {version} is named by {self.uri}/{self._config}, expected not")
        self._remove(f"{self.names.model}/{version}/{RECORD_FILE}")
        self._remove(f"{self.names.model}/{version}/")

    def prune(self, keep: set[int], *, num_kept: int) -> list[int]:
        """Removes the oldest versions beyond `num_kept`, never one of `keep` nor a served one; answers their numbers.

        Interrupted copies go too, and warm-up rows that the configuration no longer names.
        """
        self.check_held()
        self._remove_interrupted()
        versions = self.versions()
        kept = keep | self._named() | set(versions[-num_kept:])
        removed = [version for version in versions if version not in kept]
        for version in removed:
            self.withdraw(version)
        needed = warmup_files_of(self.read_config() or "")
        prefix = f"{self.names.model}/{WARMUP_FOLDER}/"
        for each in self.objects.list(prefix):
            if each.name.removeprefix(prefix) not in needed:
                self.objects.delete(each.name)
        return removed

    def read_config(self) -> str | None:
        """The configuration as it is; None where there is none."""
        stored = self.objects.read(self._config)
        # A damaged byte must not keep a rollback from replacing the text.
        return None if stored is None else stored.content.decode(errors="replace")

    def write_config(self, text: str | None) -> None:
        """Replaces the configuration whole, which publishes what it names; None removes it.

        Raises:
            Changed: another wrote it since this lock was taken.
        """
        self.check_held()
        try:
            if text is None:
                self.objects.delete(self._config, if_generation=self._config_generation)
                self._config_generation = ABSENT
            else:
                self._config_generation = self.objects.write(
                    self._config, text.encode(), if_generation=self._config_generation
                )
        except Changed as error:
            raise Changed(f"another deployment changed {self.uri}/{self._config} since this one began") from error

    def options_for(self, version: int) -> ServingOptions:
        """Return how `version` is served: as what is served now, by the kind of server that it was written for."""
        config = self.read_config()
        own = self.published.record(version).options if version in self.versions() else None
        try:
            options = read_options(config) if config is not None else own or ServingOptions()
        except ContractError as error:
            logger.warning("%s/%s: %s; what the version was staged for is used", self.uri, self._config, error)
            options = own or ServingOptions()
        return replace(options, server=own.server) if own else options

    def config_for(self, version: int, options: ServingOptions) -> str:
        """The configuration that serves `version`, warmed up with its golden rows.

        The rows are written, where they are not: Triton loads nothing by a configuration that names absent ones.
        """
        self.check_held()
        golden = self.published.golden_rows(version)
        return self._write_warmup(self.names.model, version, golden=golden, options=options)

    def place_canary(self, version: int, options: ServingOptions) -> None:
        """Makes a published version loadable under the canary's name, instead of any other that was."""
        self.remove_canary()
        for name in (*(file.name for file in self.published.record(version).files), RECORD_FILE):
            self.objects.copy(f"{self.names.model}/{version}/{name}", f"{self.names.canary}/{version}/{name}")
        self._write_loadable(self.names.canary, version, golden=self.published.golden_rows(version), options=options)

    def remove_canary(self) -> None:
        """Removes what is under the canary's name."""
        self._remove_model(self.names.canary)

    def read_plan(self) -> TrafficPlan | None:
        """The traffic plan; None where there is none."""
        stored = self.objects.read(self._plan)
        return None if stored is None else TrafficPlan.loads(stored.content, source=f"{self.uri}/{self._plan}")

    def write_plan(self, plan: TrafficPlan) -> None:
        """Publishes the traffic plan in one write.

        Raises:
            ContractError: its sequence is not one more than that of the plan it replaces (1 for the first).
            Changed: another wrote one meanwhile.
        """
        self.check_held()
        stored = self.objects.read(self._plan)
        generation, sequence = ABSENT, 0
        if stored is not None:
            generation = stored.generation
            sequence = TrafficPlan.loads(stored.content, source=f"{self.uri}/{self._plan}").sequence
        if plan.sequence != sequence + 1:
            raise ContractError(f"sequence of the traffic plan is {plan.sequence}, expected {sequence + 1}")
        self.objects.write(self._plan, plan.dumps(), if_generation=generation)

    def _named(self) -> set[int]:
        config = self.read_config()
        try:
            return set() if config is None else set(versions_of(config))
        except ContractError as error:
            logger.error("%s/%s is damaged: %s", self.uri, self._config, error)
            return set(self.taken_numbers())  # any of them may be the one that is served

    def _write_loadable(self, name: str, version: int, *, golden: GoldenRows, options: ServingOptions) -> None:
        """Makes the version loadable under `name`, its configuration last."""
        config = self._write_warmup(name, version, golden=golden, options=options)
        self.objects.write(f"{name}/{CONFIG_FILE}", config.encode())

    def _write_warmup(self, name: str, version: int, *, golden: GoldenRows, options: ServingOptions) -> str:
        """Writes the rows of the warm-up; the configuration that names them."""
        rows, contents = warmup_files(golden, options.warmup_rows)
        for file, content in contents.items():
            self.objects.write(f"{name}/{WARMUP_FOLDER}/{file}", content)
        return triton_config(name, options, [version], features=golden.features, warmup=rows)

    def _remove_interrupted(self) -> None:
        """Removes interrupted copies of versions; one that the configuration names is a fault, and stays."""
        interrupted = set(self.taken_numbers()) - set(self.versions())
        for version in sorted(interrupted - self._named()):
            logger.warning("the copy of version %d to %s was interrupted, removing it", version, self.uri)
            self.withdraw(version)

    def _remove_model(self, name: str) -> None:
        self.check_held()
        # Without its configuration no server can load what is half removed.
        self._remove(f"{name}/{CONFIG_FILE}")
        self._remove(f"{name}/")

    def _remove(self, prefix: str) -> None:
        for each in self.objects.list(prefix):
            self.objects.delete(each.name)
