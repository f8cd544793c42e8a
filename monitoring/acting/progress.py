"""What the request under way remembers between two turns and over restarts, and how older state folders are read."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from monitoring.acting.recipe import RecipeMemory
from monitoring.acting.restraint import RestraintMemory

IDLE, DECIDED, UPLOADING, SUBMITTING, RUNNING = "idle", "decided", "uploading", "submitting", "running"
PROGRESS, RESTRAINT, RECIPE = "retraining", "restraint", "recipe"
"""Names of the documents."""
_OLDER_RESTRAINT = "policy"
"""Document of the version in which policy and restraint shared one; the policy's fields in it are not ours."""
M = TypeVar("M")


class Documents(Protocol):
    """Keeps small JSON objects by name: `monitoring.memory.store`, or `monitoring.acting.ledger` for all replicas."""

    def read_document(self, name: str) -> dict[str, Any] | None:
        """The object kept under `name`; None where there is none."""

    def write_documents(self, documents: dict[str, dict[str, Any]], counts: dict[str, float] | None = None) -> None:
        """Keeps these objects, all or none, and adds to counters with them."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where the request under way stands; kept as JSON."""

    phase: str = IDLE
    request: dict[str, Any] | None = None
    """The `RetrainRequest`'s fields; None when idle."""
    decided_at: float = 0.0
    upload_deadline: float = 0.0
    next_try_at: float = 0.0
    awaited: tuple[str, ...] = ()
    """Files sealed when the archive was flushed; those that follow belong to the next run."""
    told: str = ""
    """The obstacle told of last: `busy` or `unreachable`; each is told once."""
    started_at: float = 0.0
    unknown_since: float = 0.0
    """Since when the trigger knows nothing of the run; 0 = it does."""
    is_overdue: bool = False
    """Whether it was told that the run takes long."""


def read_memory(documents: Documents, name: str, kind: type[M]) -> M:
    """The memory of dataclass `kind` kept under `name`; its defaults where there is none.

    Fields that `kind` does not have are let go: another version of the monitor wrote them.
    """
    kept = documents.read_document(name)
    if kept is None and name == RESTRAINT:
        kept = documents.read_document(_OLDER_RESTRAINT)
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{key: _frozen(value) for key, value in (kept or {}).items() if key in known})


def read_all(documents: Documents) -> tuple[Progress, RestraintMemory, RecipeMemory]:
    """What the last monitor remembered of its request, its rests and its past runs."""
    return (
        read_memory(documents, PROGRESS, Progress),
        read_memory(documents, RESTRAINT, RestraintMemory),
        read_memory(documents, RECIPE, RecipeMemory),
    )


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
