"""Triton's model repository on disk: staged versions, published versions, the configuration and the lock.

Layout: `<repository>/click_model/config.pbtxt` and `.../<version>/{model.onnx, golden.npz[, model.py]}`. A version is
staged under another model's name (`click_model_candidate`, same filesystem, loadable by Triton for a rehearsal) and
published by one rename; Triton, in explicit control, looks only when told. Telling it is left to `switch`.
The lock is the kernel's (flock), so it cannot outlive a killed deployment; it needs a filesystem that has it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from components.contracts.durable import fsync_path, write_whole
from components.contracts.errors import ContractError, TemporaryError
from components.contracts.serving import CANDIDATE_NAME, MODEL_NAME
from components.deployment.graph_files import GRAPH_FILE, graph_sha256
from components.deployment.parity import GoldenRows
from components.deployment.triton_config import ONNXRUNTIME, PYTHON, triton_config
from components.storage.folder import FolderObjects
from components.storage.objects import Objects

GOLDEN_FILE = "golden.npz"
CODE_FILE = "model.py"
CONFIG_FILE = "config.pbtxt"
_LOCK_FILE = ".deployment.lock"
_SERVED_MODEL = Path(__file__).with_name("served_model.py")


class ModelRepository:
    """The repository below `objects`, which is created if absent."""

    def __init__(self, objects: Objects) -> None:
        assert isinstance(objects, FolderObjects)
        path = self.path = objects.root
        self._model = path / MODEL_NAME
        self._candidate = path / CANDIDATE_NAME

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps every other deployment out of this repository; also the proof that it can be written.

        Raises:
            ContractError: the repository cannot be written; names the path.
            TemporaryError: another deployment is at work.
        """
        try:
            self._model.mkdir(parents=True, exist_ok=True)
            if not os.access(self._model, os.W_OK):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))
            descriptor = os.open(self.path / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ContractError(f"model repository {self.path} is not writable: {error.strerror}") from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise TemporaryError(f"another deployment is at work in model repository {self.path}") from error
            yield
        finally:
            os.close(descriptor)

    def versions(self) -> list[int]:
        """Published versions, ascending."""
        return sorted(int(p.name) for p in self._model.glob("*") if p.name.isdigit() and p.is_dir())

    def version_path(self, version: int) -> Path:
        """The folder of a published version."""
        return self._model / str(version)

    def golden_rows(self, version: int) -> GoldenRows:
        """The rows that a published version must answer as training did."""
        return GoldenRows.load(self.version_path(version) / GOLDEN_FILE)

    def server_of(self, version: int) -> str:
        """Which server a published version was written for."""
        return PYTHON if (self.version_path(version) / CODE_FILE).exists() else ONNXRUNTIME

    def stage(self, version: int, graph: Path, golden: GoldenRows, server: str) -> Path:
        """Copies a version (its graph's folder) under the candidate's name, flushed to disk; answers its folder."""
        shutil.rmtree(self._candidate, ignore_errors=True)
        folder = self._candidate / str(version)
        write_whole(folder / GRAPH_FILE, (graph / GRAPH_FILE).read_bytes())
        golden.save(folder / GOLDEN_FILE)
        if server == PYTHON:
            # A version without its code would hang Triton's loader for ever.
            write_whole(folder / CODE_FILE, _SERVED_MODEL.read_bytes())
        write_whole(self._candidate / CONFIG_FILE, triton_config(CANDIDATE_NAME, server, [version]))
        fsync_path(self._candidate)
        fsync_path(self.path)
        return folder

    def publish(self, version: int) -> None:
        """Moves the staged version to its place in one rename."""
        shutil.rmtree(self._candidate / str(version) / "__pycache__", ignore_errors=True)
        os.rename(self._candidate / str(version), self.version_path(version))
        fsync_path(self._model)
        self.discard_candidate()

    def discard_candidate(self) -> None:
        """Removes what is staged, if anything."""
        shutil.rmtree(self._candidate, ignore_errors=True)

    def withdraw(self, version: int) -> None:
        """Removes a published version: out of Triton's sight in one rename, then from disk."""
        aside = self.path / f".withdrawn-{version}-{uuid4().hex}"
        if self.version_path(version).exists():
            os.rename(self.version_path(version), aside)
            fsync_path(self._model)
            shutil.rmtree(aside, ignore_errors=True)

    def prune(self, keep: set[int], *, num_kept: int) -> list[int]:
        """Removes the oldest versions beyond `num_kept`, never one of `keep`; answers what was removed."""
        newest = set(self.versions()[-num_kept:])
        removed = [version for version in self.versions() if version not in keep | newest]
        for version in removed:
            self.withdraw(version)
        return removed

    def read_config(self) -> str | None:
        """The configuration as it is; None where there is none."""
        path = self._model / CONFIG_FILE
        return path.read_text() if path.exists() else None

    def write_config(self, text: str | None) -> None:
        """Replaces the configuration whole; None removes it."""
        if text is None:
            (self._model / CONFIG_FILE).unlink(missing_ok=True)
            fsync_path(self._model)
        else:
            write_whole(self._model / CONFIG_FILE, text)

    def graph_sha256(self, version: int) -> str:
        """Hash of a published version's graph."""
        return graph_sha256(self.version_path(version))
