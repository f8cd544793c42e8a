"""Small JSON objects kept by name over restarts in `monitoring.memory.store`, and reading one as a dataclass."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, TypeVar

M = TypeVar("M")


class Documents(Protocol):
    """Keeps JSON objects by name, and counters."""

    def read_document(self, name: str) -> dict[str, Any] | None:
        """The object kept under `name`; None if there is none."""

    def write_documents(self, documents: dict[str, dict[str, Any]], counts: dict[str, float] | None = None) -> None:
        """Keeps these objects, all or none, and adds to counters in the same transaction.

        Raises:
            TemporaryError: the disk is full; nothing was kept.
        """


def read_memory(documents: Documents, name: str, kind: type[M]) -> M:
    """The dataclass `kind` kept under `name`; its defaults if there is none."""
    kept = documents.read_document(name) or {}
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in kept.items()})


def as_document(memory: Any) -> dict[str, Any]:
    """The dataclass as `read_memory` reads it."""
    return dataclasses.asdict(memory)
