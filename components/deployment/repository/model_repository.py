"""Triton's model repository, in a folder or a bucket: staged versions, published ones, the configuration and the lock.

Layout: `click_model/config.pbtxt` and `click_model/<version>/{model.onnx[, model.data], golden.npz[, model.py],
version.json}`, rows for the warm-up in `click_model/warmup/`. A version is staged under another model's name
(`click_model_candidate`, loadable for a rehearsal), compared byte for byte with what was meant, and moved to its
place, where nobody sees it: **the one atomic write that publishes is config.pbtxt**, which names versions. A server
that starts in the middle thus loads what was published last. A copy that broke off is named by nobody, its number is
not used again, and the next deployment clears it away.

Changes need `locked()`, and the configuration is written only over the one that the lock's holder found: a holder whose
lease ended unnoticed fails there. Reading version folders is `repository.versions`', telling the servers `switch`'s.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from components.contracts.serving import CANARY_NAME, CANDIDATE_NAME, MODEL_NAME
from components.deployment.graph.parity import GoldenRows
from components.deployment.repository.files import RECORD_FILE, assemble, warmup_files
from components.deployment.repository.lock import LEASE_SECONDS, Check, exclusive
from components.deployment.repository.triton_config import (
    ServingOptions,
    triton_config,
    versions_of,
    warmup_files_of,
    with_versions,
)
from components.deployment.repository.versions import VersionFolders
from components.runtime.errors import ContractError, PermanentError
from components.storage.folder import FolderObjects
from components.storage.objects import ABSENT, Changed, Objects
from components.store.traffic_plan import TRAFFIC_FILE, TrafficPlan

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.pbtxt"
WARMUP_FOLDER = "warmup"


class ModelRepository:
    """The repository in `objects`, which is made at the first write.

    Args:
        objects: A folder's or a bucket's.
        holder: Who works here, for the errors of others; default: this process.
        lease_seconds: How long a bucket's lock outlives a killed holder.
        clock: Seconds since the epoch.
        monotonic: Seconds by a clock that nobody sets.
    """

    def __init__(
        self,
        objects: Objects,
        *,
        holder: str | None = None,
        lease_seconds: float = LEASE_SECONDS,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.objects = objects
        self.uri = objects.uri
        self._holder = holder or f"process {os.getpid()} on {socket.gethostname()}"
        self._lease_seconds, self._clock, self._monotonic = lease_seconds, clock, monotonic
        self._check: Check | None = None
        self._config_generation = ABSENT
        self._published = VersionFolders(objects, MODEL_NAME)
        self._staged = VersionFolders(objects, CANDIDATE_NAME)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps every other deployment out of this repository; also the proof that it can be written.

        Raises:
            ContractError: the folder cannot be written; names the path.
            TemporaryError: another deployment is at work; names it.
        """
        folder = self.objects.root if isinstance(self.objects, FolderObjects) else None
        with exclusive(
            self.objects,
            folder,
            holder=self._holder,
            lease_seconds=self._lease_seconds,
            clock=self._clock,
            monotonic=self._monotonic,
        ) as check:
            config = self.objects.read(f"{MODEL_NAME}/{CONFIG_FILE}")
            self._config_generation = ABSENT if config is None else config.generation
            self._check = check
            try:
                yield
            finally:
                self._check = None

    def versions(self) -> list[int]:
        """Versions whose files are all there, ascending; named by the configuration or not."""
        return self._published.whole()

    def canary_versions(self) -> list[int]:
        """Versions under the canary's name whose files are all there: one, or none."""
        return VersionFolders(self.objects, CANARY_NAME).whole()

    def taken_numbers(self) -> list[int]:
        """Every version number of which anything is there, broken-off copies too, ascending."""
        return sorted(self._published.sizes())

    def version_path(self, version: int) -> Path:
        """The folder of a published version, where the repository is a folder of this machine.

        Raises:
            ContractError: it is a bucket.
        """
        path = self.objects.local(f"{MODEL_NAME}/{version}")
        if path is None:
            raise ContractError(f"model repository is {self.uri}, expected a folder of this machine")
        return path

    def golden_rows(self, version: int) -> GoldenRows:
        """The rows that a published version must answer as training did.

        Raises:
            ContractError: they are absent or damaged.
        """
        return self._published.golden_rows(version)

    def server_of(self, version: int) -> str:
        """Which server a published version was written for."""
        return self.options_of(version).server

    def options_of(self, version: int) -> ServingOptions:
        """What a published version was staged for."""
        return self._published.record(version).options

    def graph_sha256(self, version: int) -> str:
        """Hash of a published version's graph, from its bytes and not from its record."""
        return self._published.graph_sha256(version)

    def download_graph(self, version: int, folder: Path, *, staged: bool = False) -> None:
        """Puts the graph's files of a version, published or staged, into the local `folder`.

        Raises:
            ContractError: there is no such version, or its graph is damaged.
        """
        (self._staged if staged else self._published).download_graph(version, folder)

    def check_version(self, version: int, *, staged: bool = False) -> None:
        """Returns if every file of a version, published or staged, is byte for byte what its record says.

        Raises:
            ContractError: a file is damaged or absent; names it and both hashes.
        """
        (self._staged if staged else self._published).check(version)

    def stage(self, version: int, graph: Path, golden: GoldenRows, options: ServingOptions) -> None:
        """Copies a version (its graph's folder) under the candidate's name, and reads all of it back.

        Raises:
            PermanentError: what is read back is not what was written, or there is no room.
        """
        self.check_held()
        self._clear_broken()
        self.discard_candidate()
        with TemporaryDirectory(prefix="evergreen-stage-") as scratch:
            for name, path in assemble(version, graph, golden, options, Path(scratch)).items():
                self.objects.write(f"{CANDIDATE_NAME}/{version}/{name}", path, if_generation=ABSENT)
        self._write_warmup(CANDIDATE_NAME, golden, options)
        # Triton's cache knows a model by name and number, not by its bytes: a rehearsal must not hear a predecessor.
        # One instance shows what a load can reveal, and each takes processor time from the version that serves.
        rehearsed = replace(options, response_cache=False, instances=1)
        self.objects.write(
            f"{CANDIDATE_NAME}/{CONFIG_FILE}", self._config(CANDIDATE_NAME, golden, [version], rehearsed)
        )
        try:
            self.check_version(version, staged=True)
        except ContractError as error:
            raise PermanentError(f"what was staged did not stay as it was written: {error}") from error

    def publish(self, version: int) -> None:
        """Moves the staged version to its place, where nobody sees it until the configuration names it.

        Raises:
            ContractError: it is not staged whole, or its number is taken.
        """
        self.check_held()
        record = self._staged.record(version)
        prefix = f"{CANDIDATE_NAME}/{version}/"
        for each in self.objects.list(prefix):
            # A rehearsal's Python leaves its cache.
            if each.name.removeprefix(prefix) not in {*record.files, RECORD_FILE}:
                self.objects.delete(each.name)
        self.objects.move(f"{CANDIDATE_NAME}/{version}", f"{MODEL_NAME}/{version}")
        if version not in self.versions():
            raise PermanentError(f"version {version} did not arrive whole in {self.uri}/{MODEL_NAME}")
        self.discard_candidate()

    def discard_candidate(self) -> None:
        """Removes what is staged, if anything."""
        self.check_held()
        self._remove(f"{CANDIDATE_NAME}/{CONFIG_FILE}")
        self._remove(f"{CANDIDATE_NAME}/")

    def withdraw(self, version: int) -> None:
        """Removes a version; from its first step on it counts as broken off.

        Raises:
            ContractError: the configuration names it.
        """
        self.check_held()
        if version in self._named():
            raise ContractError(f"version {version} is named by {self.uri}/{MODEL_NAME}/{CONFIG_FILE}, expected not")
        self._remove(f"{MODEL_NAME}/{version}/{RECORD_FILE}")
        self._remove(f"{MODEL_NAME}/{version}/")

    def prune(self, keep: set[int], *, num_kept: int) -> list[int]:
        """Removes the oldest versions beyond `num_kept`, never one of `keep` nor a served one; answers their numbers.

        Broken-off copies go too, and the rows of warm-ups that the configuration no longer names.
        """
        self.check_held()
        self._clear_broken()
        versions = self.versions()
        kept = keep | self._named() | set(versions[-num_kept:])
        removed = [version for version in versions if version not in kept]
        for version in removed:
            self.withdraw(version)
        needed = warmup_files_of(self.read_config() or "")
        prefix = f"{MODEL_NAME}/{WARMUP_FOLDER}/"
        for each in self.objects.list(prefix):
            if each.name.removeprefix(prefix) not in needed:
                self.objects.delete(each.name)
        return removed

    def read_config(self) -> str | None:
        """The configuration as it is; None where there is none."""
        stored = self.objects.read(f"{MODEL_NAME}/{CONFIG_FILE}")
        return None if stored is None else stored.content.decode()

    def write_config(self, text: str | None) -> None:
        """Replaces the configuration whole, which publishes what it names; None removes it.

        Raises:
            Changed: another wrote it since this lock was taken.
        """
        self.check_held()
        name = f"{MODEL_NAME}/{CONFIG_FILE}"
        try:
            if text is None:
                self.objects.delete(name, if_generation=self._config_generation)
                self._config_generation = ABSENT
            else:
                self._config_generation = self.objects.write(name, text.encode(), if_generation=self._config_generation)
        except Changed as error:
            raise Changed(f"another deployment changed {self.uri}/{name} since this one began") from error

    def leave_out(self, version: int) -> None:
        """Takes `version` out of the configuration that names it beside others, so that it can be put there anew.

        For one that is not whole: damaged, or written before versions had records. Running servers need not be told;
        they answer with what they have loaded.
        """
        self.check_held()
        text = self.read_config()
        named = [] if text is None else versions_of(text)
        if text is not None and version in named and len(named) > 1:
            self.write_config(with_versions(text, [other for other in named if other != version]))

    def config_for(self, version: int, versions: list[int], options: ServingOptions) -> str:
        """The configuration that serves exactly `versions`, warmed up with the golden rows of `version`.

        The rows are written, where they are not: Triton loads nothing by a configuration that names absent ones.
        """
        self.check_held()
        golden = self.golden_rows(version)
        self._write_warmup(MODEL_NAME, golden, options)
        return self._config(MODEL_NAME, golden, versions, options).decode()

    def place_canary(self, version: int, options: ServingOptions | None = None) -> None:
        """Makes a published version loadable under the canary's name, instead of any other that was.

        Args:
            version: Which.
            options: How it is served; default: what it was staged for.
        """
        self.check_held()
        self.remove_canary()
        record, golden = self._published.record(version), self.golden_rows(version)
        options = options or record.options
        for name in (*record.files, RECORD_FILE):
            self.objects.copy(f"{MODEL_NAME}/{version}/{name}", f"{CANARY_NAME}/{version}/{name}")
        self._write_warmup(CANARY_NAME, golden, options)
        self.objects.write(f"{CANARY_NAME}/{CONFIG_FILE}", self._config(CANARY_NAME, golden, [version], options))

    def remove_canary(self) -> None:
        """Removes what is under the canary's name, its configuration first."""
        self.check_held()
        self._remove(f"{CANARY_NAME}/{CONFIG_FILE}")
        self._remove(f"{CANARY_NAME}/")

    def read_plan(self) -> TrafficPlan | None:
        """The traffic plan; None where there is none."""
        stored = self.objects.read(TRAFFIC_FILE)
        return None if stored is None else TrafficPlan.loads(stored.content, source=f"{self.uri}/{TRAFFIC_FILE}")

    def write_plan(self, plan: TrafficPlan) -> None:
        """Publishes the traffic plan in one write.

        Raises:
            ContractError: its sequence is not one more than that of the plan it replaces (1 for the first).
            Changed: another wrote one meanwhile.
        """
        self.check_held()
        stored = self.objects.read(TRAFFIC_FILE)
        generation, sequence = ABSENT, 0
        if stored is not None:
            generation = stored.generation
            sequence = TrafficPlan.loads(stored.content, source=f"{self.uri}/{TRAFFIC_FILE}").sequence
        if plan.sequence != sequence + 1:
            raise ContractError(f"sequence of the traffic plan is {plan.sequence}, expected {sequence + 1}")
        self.objects.write(TRAFFIC_FILE, plan.dumps(), if_generation=generation)

    def check_held(self) -> None:
        """Returns if the lock is still held.

        Raises:
            TemporaryError: a bucket's lease ended, or another deployment took it over.
        """
        assert self._check is not None, "changes of the model repository need its lock"
        self._check()

    def _named(self) -> set[int]:
        config = self.read_config()
        return set() if config is None else set(versions_of(config))

    def _config(self, name: str, golden: GoldenRows, versions: list[int], options: ServingOptions) -> bytes:
        rows, _ = warmup_files(golden, options.warmup_rows)
        return triton_config(name, options, versions, warmup=rows).encode()

    def _write_warmup(self, name: str, golden: GoldenRows, options: ServingOptions) -> None:
        _, contents = warmup_files(golden, options.warmup_rows)
        for file, content in contents.items():
            self.objects.write(f"{name}/{WARMUP_FOLDER}/{file}", content)

    def _clear_broken(self) -> None:
        """Removes copies of versions that broke off; one that the configuration names is a fault, and stays."""
        broken = set(self.taken_numbers()) - set(self.versions())
        for version in sorted(broken - self._named()):
            logger.warning("version %d in %s broke off while it was copied, removing it", version, self.uri)
            self.withdraw(version)

    def _remove(self, prefix: str) -> None:
        for each in self.objects.list(prefix):
            self.objects.delete(each.name)
