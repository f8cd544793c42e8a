"""Manage one recommender's part of Triton's model repository, in a folder or a bucket.

This part of the repository contains versions, a configuration, a traffic plan and a lock. The
layout for a recommender called shop is `shop/config.pbtxt` and `shop/<version>/{model.onnx[,
model.data], golden.npz[, model.py], version.json}`, with the warm-up rows in `shop/warmup/`. A
version is first staged under another model's name (`shop_candidate`), where servers can load it for
a rehearsal. The staged version is compared with its source byte by byte, and moved to its final
folder, which no server reads yet. **The version is published by one atomic write of config.pbtxt**,
which names the version. A server that starts during a release therefore loads the last published
version. If a copy is interrupted, no configuration contains its version number. This number is not
reused, and the next deployment removes the copy. Recommenders in the same repository share no
files.

Before a change, the caller must take the lock with `locked()`. In a folder, the lock is the
kernel's flock, which is released if the process is killed. The filesystem must support flock. In a
bucket, the lock is a lease, which expires. A write of the configuration succeeds only if its
generation has not changed since the lock holder first read it. A holder whose lease has expired
unnoticed therefore cannot write. Another module notifies the servers (`controller.moves`).

The object `<name>.fence.json` contains the number of the lock, which grows by one each time a
controller takes the lock. The lock holder compares its number with this object before each change,
and writes the number into the configuration, as a comment, and into the traffic plan. If the
previous holder did not release the lock, the new holder first writes the configuration and the plan
again. The next conditional write of the previous holder therefore fails, even if that holder is
still running. If there is no configuration yet, the new holder writes only the comment, which
counts as no configuration. If there is no plan yet, the previous holder could still write a first
plan. The new holder replaces this plan, because its lease number is lower.

`version.json` lists every file of its version with size and SHA-256. If a folder lacks this file,
or if a listed file is absent or has another size, the folder is an interrupted copy and not a
version. `VersionFolders` reads the versions of one served model.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from evergreen.contracts.manifests import Manifest
from evergreen.contracts.serving import (
    CODE_FILE,
    CONFIG_FILE,
    PYTHON,
    ServedNames,
    named_inputs,
    versions_of,
)
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

logger = logging.getLogger(__name__)

WARMUP_FOLDER = "warmup"
LEASE_SECONDS = 60.0
GOLDEN_FILE = "golden.npz"
RECORD_FILE = "version.json"
_LEASE_COMMENT = "# lease "
"""Start of the first line of a configuration. The line contains the lease number of its writer."""
_SERVED_MODEL = Path(__file__).resolve().parents[1] / "served_model.py"


class NotWritable(ContractError):
    """This process has no rights to write the folder of the model repository."""


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Name, size and hash of one file of a version."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class VersionRecord(Manifest):
    """Content of `version.json`."""

    version: int
    graph_sha256: str
    """Hash of the graph, see `evergreen.registry.models.graph_sha256`."""
    options: ServingOptions
    """Serving options at the time of staging."""
    files: list[FileRecord]
    """List of every file of the version except the record."""

    def __post_init__(self) -> None:
        if not {GRAPH_FILE, GOLDEN_FILE} <= (names := {file.name for file in self.files}):
            raise ContractError(
                f"names {sorted(names)}, expected {GRAPH_FILE} and {GOLDEN_FILE} among them"
            )

    def is_whole(self, sizes: Mapping[str, int]) -> bool:
        """Return whether `sizes` (bytes by name) contains every file with its recorded size."""
        return all(sizes.get(file.name) == file.bytes for file in self.files)


def assemble(version: int, folder: Path, options: ServingOptions) -> dict[str, Path | bytes]:
    """Return the path or the content of each file of a version, by name.

    `folder` contains the graph and the golden rows.

    The record must be written last. A folder without its record does not count as a version.
    """
    files = {
        name: folder / name
        for name in (GRAPH_FILE, DATA_FILE, GOLDEN_FILE)
        if (folder / name).exists()
    }
    if options.server == PYTHON:
        # Triton's loader hangs forever on a version without its code.
        files[CODE_FILE] = _SERVED_MODEL
    record = VersionRecord(
        version=version,
        graph_sha256=graph_sha256(folder),
        options=options,
        files=[
            FileRecord(name=name, bytes=path.stat().st_size, sha256=sha256_file(path))
            for name, path in files.items()
        ],
    )
    return {**files, RECORD_FILE: record.dumps()}


def warmup_files(golden: GoldenRows, num_rows: int) -> tuple[list[WarmupRow], dict[str, bytes]]:
    """Return Triton's warm-up rows, and the content of each warm-up file by name.

    The warm-up rows are the first golden rows.

    The name of a file is the hash of its content. A configuration that is restored therefore still
    refers to its own warm-up rows.
    """
    rows: list[WarmupRow] = []
    contents: dict[str, bytes] = {}
    for at in range(min(num_rows, len(golden))):
        row = {}
        for tensor, values in named_inputs(
            golden.dense[at : at + 1], golden.categorical[at : at + 1]
        ).items():
            content = values.astype(values.dtype.newbyteorder("<")).tobytes()
            row[tensor] = f"{tensor}-{hashlib.sha256(content).hexdigest()[:16]}"
            contents[row[tensor]] = content
        rows.append(row)
    return rows, contents


class VersionFolders:
    """Version folders `<name>/<version>/` in `objects`."""

    def __init__(self, objects: Objects, name: str) -> None:
        self._objects = objects
        self._name = name
        self.uri = f"{objects.uri}/{name}"

    def sizes(self) -> dict[int, dict[str, int]]:
        """Return the size in bytes of every file, by version and file name.

        Files of interrupted copies are included.
        """
        found: dict[int, dict[str, int]] = {}
        for each in self._objects.list(f"{self._name}/"):
            _, folder, *rest = each.name.split("/")
            if rest and folder.isascii() and folder.isdigit() and folder == str(int(folder)):
                found.setdefault(int(folder), {})["/".join(rest)] = each.size
        return found

    def whole(self) -> list[int]:
        """Return the complete versions in ascending order.

        A version is complete if every file has its recorded size.
        """
        whole = []
        for version, sizes in self.sizes().items():
            try:
                if RECORD_FILE in sizes and self.record(version).is_whole(sizes):
                    whole.append(version)
            except ContractError as error:
                logger.warning("version skipped: %s", error)
        return sorted(whole)

    def record(self, version: int) -> VersionRecord:
        """Read the record of a version: the files of the version and their hashes.

        Raises:
            ContractError: the version does not exist, or its record is corrupt or belongs to
                another version.
        """
        path = f"{self._name}/{version}/{RECORD_FILE}"
        stored = self._objects.read(path)
        if stored is None:
            raise ContractError(f"{self._objects.uri}/{path} is absent, expected in every version")
        record = VersionRecord.loads(stored.content, source=f"{self._objects.uri}/{path}")
        if record.version != version:
            raise ContractError(
                f"{self._objects.uri}/{path} is about version {record.version}, expected {version}"
            )
        return record

    def golden_rows(self, version: int) -> GoldenRows:
        """Read the version's golden rows.

        Raises:
            ContractError: the rows are absent or corrupt.
        """
        [expected] = [file for file in self.record(version).files if file.name == GOLDEN_FILE]
        with TemporaryDirectory(prefix="evergreen-golden-") as scratch:
            return GoldenRows.load(self._checked_file(version, expected, Path(scratch)))

    def hashes(self, version: int) -> dict[str, str]:
        """Return the SHA-256 of each stored file of the version, by file name."""
        found = {}
        for name in self.sizes().get(version, {}):
            with TemporaryDirectory(prefix="evergreen-check-") as scratch:
                found[name] = sha256_file(self._local_file(version, name, Path(scratch)))
        return found

    def fetch(self, version: int, file: str, target: Path) -> None:
        """Copy one file of a version to the local path `target`."""
        with TemporaryDirectory(prefix="evergreen-fetch-") as scratch:
            source = self._local_file(version, file, Path(scratch))
            with open(source, "rb") as content, whole_file(target) as copy:
                shutil.copyfileobj(content, copy)

    def replace(self, version: int, file: str, content: bytes | Path) -> None:
        """Replace a file of the version atomically."""
        self._objects.write(f"{self._name}/{version}/{file}", content)

    def check(self, version: int) -> None:
        """Check every file against the hash in the record.

        Raises:
            ContractError: a file is corrupt or absent. The message names the file and both hashes.
        """
        for file in self.record(version).files:
            with TemporaryDirectory(prefix="evergreen-check-") as scratch:
                self._checked_file(version, file, Path(scratch))

    def _checked_file(self, version: int, file: FileRecord, folder: Path) -> Path:
        path = self._local_file(version, file.name, folder)
        if (found := sha256_file(path)) != file.sha256:
            raise ContractError(
                f"{self.uri}/{version}/{file.name} has sha256 {found}, expected {file.sha256}"
            )
        return path

    def _local_file(self, version: int, file: str, folder: Path) -> Path:
        """Return the local path of a file, or of a copy in `folder` if the file is not local."""
        path = f"{self._name}/{version}/{file}"
        local = self._objects.local(path)
        if local is not None and local.is_file():
            return local
        download(self._objects, path, folder / file)
        return folder / file


class ModelRepository:
    """Repository in `objects`, which is created at the first write.

    Args:
        objects: Folder or bucket.
        names: Names of the recommender's models.
        holder: Description of this deployment, for error messages of other deployments. By default,
            the description consists of the host and the id of this process.
        min_lease: Largest lease number in the journal. The largest number in the repository is
            lower if the repository was emptied.
        lease_seconds: Time after which a bucket's lock of a killed holder expires.
        clock: Wall clock in seconds since the epoch.
        monotonic: Monotonic clock in seconds.
    """

    def __init__(
        self,
        objects: Objects,
        names: ServedNames,
        *,
        holder: str | None = None,
        min_lease: int = 0,
        lease_seconds: float = LEASE_SECONDS,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.objects = objects
        self.names = names
        self.uri = objects.uri
        self.published = VersionFolders(objects, names.model)
        """Versions of the served model, including versions that the configuration does not name."""
        self.staged = VersionFolders(objects, names.candidate)
        self.canary = VersionFolders(objects, names.canary)
        """Versions under the canary's name, at most one."""
        self._holder = holder or f"process {os.getpid()} on {socket.gethostname()}"
        self._lease_seconds, self._clock, self._monotonic = lease_seconds, clock, monotonic
        self._min_lease = min_lease
        self._check_lock: Callable[[], None] | None = None
        self.lease = 0
        """Number of the lock that this process took last. 0 = this process has never taken the
        lock."""
        self._config_generation = self._plan_generation = ABSENT
        self._config = f"{names.model}/{CONFIG_FILE}"
        self._plan = traffic_file(names.model)
        self._fence = f"{names.model}.fence.json"

    @property
    def is_locked(self) -> bool:
        """Whether this object holds the lock."""
        return self._check_lock is not None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock out the recommender's other controllers, and check that the repository is writable.

        Inside another `locked` of this object, the call does nothing.

        Raises:
            NotWritable: this process has no rights to write the folder. The message names the path.
            ContractError: the path cannot be a folder. The message names the path.
            TemporaryError: another controller holds the lock. The message names the holder.
        """
        if self.is_locked:
            yield
            return
        lock = (
            self._flock(self.objects.root)
            if isinstance(self.objects, FolderObjects)
            else self._lease()
        )
        with lock as check:
            self._check_lock = check
            try:
                self._take_fence()
                yield
            finally:
                with suppress(TemporaryError, PermanentError, ContractError):
                    self._release_fence()
                self._check_lock = None

    def _take_fence(self) -> None:
        """Increase the number of the lock, so that writes of the previous holder fail."""
        stored = self.objects.read(self._fence)
        number, was_released = (0, True) if stored is None else self._parse_fence(stored.content)
        number = max(number, self._min_lease)
        try:
            self._write_fence(number + 1, False, ABSENT if stored is None else stored.generation)
        except Changed as error:
            raise TemporaryError(
                f"another controller took model repository {self.published.uri} meanwhile"
            ) from error
        self.lease = number + 1
        config, plan = self.objects.read(self._config), self.objects.read(self._plan)
        self._config_generation = ABSENT if config is None else config.generation
        self._plan_generation = ABSENT if plan is None else plan.generation
        if not was_released:
            logger.warning("lease %d of %s was not released", number, self.published.uri)
            self._write_config("" if config is None else _text(config.content))
            if plan is not None:
                self._plan_generation = self.objects.write(
                    self._plan, self._with_lease(plan.content), if_generation=plan.generation
                )

    def _release_fence(self) -> None:
        stored = self.objects.read(self._fence)
        if stored is not None and self._parse_fence(stored.content)[0] == self.lease:
            self._write_fence(self.lease, True, stored.generation)

    def _write_fence(self, number: int, is_released: bool, generation: int) -> None:
        document = {"number": number, "holder": self._holder, "released": is_released}
        content = (json.dumps(document) + "\n").encode()
        self.objects.write(self._fence, content, if_generation=generation)

    def _parse_fence(self, content: bytes) -> tuple[int, bool]:
        """Return the lease number, and whether the holder of the lease released the lock."""
        try:
            document = json.loads(content)
            return int(document["number"]), bool(document["released"])
        except (ValueError, TypeError, KeyError) as error:
            raise PermanentError(
                f"{self.uri}/{self._fence} is not a lease number ({error!r}), expected one; remove "
                "it if no controller is at work"
            ) from error

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
                f"another controller is at work in model repository {self.published.uri}: {error}"
            ) from error
        with lease.renewed():
            yield lease.check

    @contextmanager
    def _flock(self, folder: Path) -> Iterator[Callable[[], None]]:
        before = own_umask(READABLE)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))
            descriptor = os.open(
                folder / f".{self.names.model}.lock", os.O_RDWR | os.O_CREAT, 0o644
            )
        except OSError as error:
            has_rights = error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS)
            kind = ContractError if has_rights else NotWritable
            raise kind(f"model repository {folder} is not writable: {error.strerror}") from error
        finally:
            own_umask(before)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                other = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "unknown"
                raise TemporaryError(
                    f"another controller is at work in model repository {self.published.uri}: it "
                    f"is held by {other}"
                ) from error
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{self._holder}\n".encode(), 0)
            yield lambda: None
        finally:
            os.close(descriptor)

    def check_held(self) -> None:
        """Check that the lock is still held.

        Raises:
            TemporaryError: a bucket's lease expired, or another controller took the lock over.
        """
        assert self._check_lock is not None, "the model repository is changed without its lock"
        self._check_lock()
        if (newest := self.newest_lease()) != self.lease:
            raise TemporaryError(
                f"{self._holder} no longer holds {self.uri}: lease {self.lease} was followed by "
                f"{newest}"
            )

    def newest_lease(self) -> int:
        """Return the highest lease number in the repository.

        0 = nobody has locked the repository yet.
        """
        stored = self.objects.read(self._fence)
        return 0 if stored is None else self._parse_fence(stored.content)[0]

    def versions(self) -> list[int]:
        """Return the complete versions in ascending order.

        The result also contains versions that the configuration does not name.
        """
        return self.published.whole()

    def taken_numbers(self) -> list[int]:
        """Return the number of each version that has at least one file, in ascending order.

        Interrupted copies are included.
        """
        return sorted(self.published.sizes())

    def stage(
        self,
        version: int,
        folder: Path,
        options: ServingOptions,
        *,
        proceed: Callable[[], None] = lambda: None,
    ) -> None:
        """Copy a version from `folder` to the candidate's folder, and verify the written files.

        Args:
            version: Number of the version.
            folder: Folder with the graph and its golden rows.
            options: Serving options of the version.
            proceed: Function that is called before each file. If the function raises an error, the
                copy ends with this error.

        Raises:
            PermanentError: a written file differs from its source, or the disk is full.
        """
        self.check_held()
        self._remove_interrupted()
        self.discard_candidate()
        proceed()
        for name, content in assemble(version, folder, options).items():
            proceed()
            self.objects.write(
                f"{self.names.candidate}/{version}/{name}", content, if_generation=ABSENT
            )
        # Triton's response cache identifies a model by name and number, so a rehearsal could get
        # the response of an earlier candidate. One instance is enough to test the load, and every
        # instance takes processor time from the live version.
        rehearsed = replace(options, response_cache=False, instances=1)
        golden = GoldenRows.load(folder / GOLDEN_FILE)
        self._write_loadable(self.names.candidate, version, golden=golden, options=rehearsed)
        proceed()
        try:
            self.staged.check(version)
        except ContractError as error:
            raise PermanentError(
                f"staged files changed after they were written: {error}"
            ) from error

    def publish(self, version: int) -> None:
        """Move the staged version to its final folder, which no server reads yet.

        Raises:
            ContractError: the staged version is incomplete, or its version number is already used.
        """
        self.check_held()
        record = self.staged.record(version)
        prefix = f"{self.names.candidate}/{version}/"
        for each in self.objects.list(prefix):
            # Triton's Python backend leaves cache files in the folder after a rehearsal.
            if each.name.removeprefix(prefix) not in {
                RECORD_FILE,
                *(file.name for file in record.files),
            }:
                self.objects.delete(each.name)
        self.objects.move(f"{self.names.candidate}/{version}", f"{self.names.model}/{version}")
        if version not in self.versions():
            raise PermanentError(
                f"version {version} is incomplete in {self.published.uri} after the move"
            )
        self.discard_candidate()

    def discard_candidate(self) -> None:
        """Remove the staged version, if there is one."""
        self._remove_model(self.names.candidate)

    def withdraw(self, version: int) -> None:
        """Remove a version. The version counts as interrupted as soon as its first file is deleted.

        Raises:
            ContractError: the configuration still names the version.
        """
        self.check_held()
        if version in self._named():
            raise ContractError(
                f"version {version} is served by {self.uri}/{self._config}, expected an unserved "
                "one"
            )
        self._remove(f"{self.names.model}/{version}/{RECORD_FILE}")
        self._remove(f"{self.names.model}/{version}/")

    def prune(self, keep: set[int], *, num_kept: int) -> list[int]:
        """Remove the oldest versions beyond `num_kept`, and return their numbers.

        Versions in `keep` and versions that the configuration names are never removed. Interrupted
        copies and unused warm-up rows are removed too.
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
        """Return the configuration, or None if it is absent."""
        stored = self.objects.read(self._config)
        return None if stored is None else _text(stored.content) or None

    def write_config(self, text: str | None) -> None:
        """Replace the configuration atomically.

        The replacement publishes the versions that the configuration names. If `text` is None, only
        the comment with the lease remains, which counts as no configuration. The file is not
        deleted, because a previous holder could then write it again as the first configuration.

        Raises:
            Changed: another controller has written the configuration since this lock was taken.
        """
        self.check_held()
        try:
            if text is not None or self._config_generation != ABSENT:
                self._write_config(text or "")
        except Changed as error:
            raise Changed(
                f"another controller changed {self.uri}/{self._config} since this one began"
            ) from error

    def _write_config(self, text: str) -> None:
        self._config_generation = self.objects.write(
            self._config,
            f"{_LEASE_COMMENT}{self.lease}\n{text}".encode(),
            if_generation=self._config_generation,
        )

    def options_for(self, version: int) -> ServingOptions:
        """Return the current serving options, with the backend for which `version` was staged."""
        config = self.read_config()
        own = self.published.record(version).options if version in self.versions() else None
        try:
            options = read_options(config) if config is not None else own or ServingOptions()
        except ContractError as error:
            logger.warning(
                "%s/%s: %s; the options from staging are used", self.uri, self._config, error
            )
            options = own or ServingOptions()
        return replace(options, server=own.server) if own else options

    def config_for(self, version: int, options: ServingOptions) -> str:
        """Return a configuration that serves `version` after a warm-up with golden rows.

        The warm-up rows are written first, because Triton loads no model whose warm-up files are
        absent.
        """
        self.check_held()
        golden = self.published.golden_rows(version)
        return self._write_warmup(self.names.model, version, golden=golden, options=options)

    def place_canary(self, version: int, options: ServingOptions) -> None:
        """Copy a published version to the canary's name, and replace any other canary."""
        self.remove_canary()
        for name in (*(file.name for file in self.published.record(version).files), RECORD_FILE):
            self.objects.copy(
                f"{self.names.model}/{version}/{name}", f"{self.names.canary}/{version}/{name}"
            )
        self._write_loadable(
            self.names.canary, version, golden=self.published.golden_rows(version), options=options
        )

    def remove_canary(self) -> None:
        """Remove the version under the canary's name."""
        self._remove_model(self.names.canary)

    def read_plan(self) -> TrafficPlan | None:
        """Return the traffic plan, or None if it is absent."""
        stored = self.objects.read(self._plan)
        return (
            None
            if stored is None
            else TrafficPlan.loads(stored.content, source=f"{self.uri}/{self._plan}")
        )

    def write_plan(self, plan: TrafficPlan) -> None:
        """Write the traffic plan with the number of this lease, atomically.

        Raises:
            ContractError: the plan's sequence number does not follow the number of the replaced
                plan. The first plan has the number 1.
            Changed: another controller has written a plan since this lock was taken.
        """
        self.check_held()
        stored = self.objects.read(self._plan)
        sequence = 0
        if stored is not None:
            before = TrafficPlan.loads(stored.content, source=f"{self.uri}/{self._plan}")
            sequence = before.sequence
            if self._plan_generation == ABSENT and before.lease < self.lease:
                # A previous holder wrote the first plan after it lost the lock. The write succeeded
                # because there was no earlier plan.
                self._plan_generation = stored.generation
        if plan.sequence != sequence + 1:
            raise ContractError(
                f"sequence of the traffic plan is {plan.sequence}, expected {sequence + 1}"
            )
        self._plan_generation = self.objects.write(
            self._plan,
            replace(plan, lease=self.lease).dumps(),
            if_generation=self._plan_generation,
        )

    def _with_lease(self, content: bytes) -> bytes:
        """Return the content of a plan with this lease's number.

        If the plan is corrupt, its content is returned unchanged.
        """
        try:
            plan = TrafficPlan.loads(content, source=f"{self.uri}/{self._plan}")
        except ContractError as error:
            logger.error("%s", error)
            return content
        return replace(plan, lease=self.lease).dumps()

    def _named(self) -> set[int]:
        config = self.read_config()
        try:
            return set() if config is None else set(versions_of(config))
        except ContractError as error:
            logger.error("%s/%s is corrupt: %s", self.uri, self._config, error)
            return set(self.taken_numbers())  # any version with files may be the served version

    def _write_loadable(
        self, name: str, version: int, *, golden: GoldenRows, options: ServingOptions
    ) -> None:
        """Write the files that servers need to load the version under `name`.

        The configuration is written after all files.
        """
        config = self._write_warmup(name, version, golden=golden, options=options)
        self.objects.write(f"{name}/{CONFIG_FILE}", config.encode())

    def _write_warmup(
        self, name: str, version: int, *, golden: GoldenRows, options: ServingOptions
    ) -> str:
        """Write the warm-up rows, and return the configuration that names them."""
        rows, contents = warmup_files(golden, options.warmup_rows)
        for file, content in contents.items():
            self.objects.write(f"{name}/{WARMUP_FOLDER}/{file}", content)
        return triton_config(name, options, [version], features=golden.features, warmup=rows)

    def _remove_interrupted(self) -> None:
        """Remove interrupted copies of versions.

        A copy is not removed if the configuration names its version.
        """
        interrupted = set(self.taken_numbers()) - set(self.versions())
        for version in sorted(interrupted - self._named()):
            logger.warning(
                "the copy of version %d to %s was interrupted, removing it", version, self.uri
            )
            self.withdraw(version)

    def _remove_model(self, name: str) -> None:
        self.check_held()
        # Remove the configuration first, so that no server loads incomplete files.
        self._remove(f"{name}/{CONFIG_FILE}")
        self._remove(f"{name}/")

    def _remove(self, prefix: str) -> None:
        for each in self.objects.list(prefix):
            self.objects.delete(each.name)


def _text(content: bytes) -> str:
    """Return the configuration without the lease number.

    A corrupt byte must not prevent a rollback from replacing the text, so such a byte is replaced.
    """
    return _without_lease(content.decode(errors="replace"))


def _without_lease(text: str) -> str:
    r"""Return the configuration without its first line, if that line names a lease.

    >>> _without_lease("# lease 3\nname: 1"), _without_lease("name: 1")
    ('name: 1', 'name: 1')
    """
    return text.partition("\n")[2] if text.startswith(_LEASE_COMMENT) else text
