"""A rollback or a shadow: a configured command, run once for a version, timed out, and its outcome recorded.

decided -> running -> ended. In: a kind of action, the version, its predecessor. Out: events, the memory of what was
done. Which versions were rolled back is written before the command starts, so no crash repeats it for one version; what
became of a command whose end nobody saw is read from the promotion journal. Whether to act at all is
`monitoring.acting.kinds`' and `monitoring.acting.restraint`'s.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from components.runtime.errors import ContractError
from monitoring.acting import kinds
from monitoring.acting.kinds import KindSettings
from monitoring.acting.processes import Processes
from monitoring.acting.progress import IDLE, Documents, read_memory
from monitoring.journal import Journal
from monitoring.memory.archive import no_checkpoint

CORRECTION = "correction"
DECIDED, RUNNING = "decided", "running"
KEPT_VERSIONS = 100
"""Newest versions whose rollback or shadow is remembered."""


@dataclass(frozen=True, kw_only=True)
class CorrectionMemory:
    """Where the command under way stands, and what was done; kept as JSON."""

    phase: str = IDLE
    kind: str = ""
    version: int = 0
    previous: int = 0
    reason: str = ""
    name: str = ""
    """Of the process."""
    started_at: float = 0.0
    done: tuple[str, ...] = ()
    """`<kind>-v<version>` of each command that was ever decided."""


class Correction:
    """The one command that may be under way."""

    def __init__(
        self,
        documents: Documents,
        *,
        state: Path,
        store: Path,
        journal: Journal,
        settings: KindSettings,
        guard: Callable[[], None] = lambda: None,
        checkpoint: Callable[[str], None] = no_checkpoint,
    ) -> None:
        """Takes up where a predecessor stopped.

        Args:
            documents: Where the memory is kept.
            state: The monitor's state folder.
            store: The model store.
            journal: Told of every transition.
            settings: The commands.
            guard: Called before a command is started; raises where this replica may not act.
            checkpoint: Called with the name of each step that a crash may follow.

        Raises:
            ContractError: a command line cannot be parsed.
        """
        self._documents, self._store, self._journal = documents, store, journal
        self._settings, self._guard, self._checkpoint = settings, guard, checkpoint
        self._commands = {
            kinds.ROLLBACK: _parse("rollback_command", settings.rollback_command),
            kinds.SHADOW: _parse("shadow_command", settings.shadow_command),
        }
        self._processes = Processes(state / "correction.lock", state / "corrections")
        self.memory = read_memory(documents, CORRECTION, CorrectionMemory)

    def was_done(self, kind: str, version: int) -> bool:
        """Whether this was decided for this version before, however it ended."""
        return _key(kind, version) in self.memory.done

    def begin(self, kind: str, version: int, previous: int, reason: str, *, now: float) -> None:
        """Decides on a command; only when idle, and once for a version."""
        assert self.memory.phase == IDLE
        assert not self.was_done(kind, version)
        key = _key(kind, version)
        self._journal.tell(f"{kind}_decided", reason, version=version, previous=previous)
        memory = CorrectionMemory(
            phase=DECIDED,
            kind=kind,
            version=version,
            previous=previous,
            reason=reason,
            name=key,
            started_at=now,
            done=(*self.memory.done, key)[-KEPT_VERSIONS:],
        )
        self._keep(memory)
        self._checkpoint("correction.decided")

    def step(self, now: float) -> str | None:
        """Moves the command on without waiting; its outcome in the turn in which it ended, `done` or `failed`."""
        if self.memory.phase == DECIDED:
            try:
                self._start(now)
            except (ContractError, OSError) as error:
                # To end the monitor over it would end it at every start from now on.
                return self._end("failed", f"it could not be started: {error}")
        if self.memory.phase != RUNNING:
            return None
        if self._processes.running() == self.memory.name:
            if now < self.memory.started_at + self._settings.command_timeout_seconds:
                return None
            self._processes.stop(self.memory.name)
            return self._end("failed", f"not over in {self._settings.command_timeout_seconds:g} s, killed")
        return self._end(*self._outcome())

    def _start(self, now: float) -> None:
        memory = self.memory
        if not self._is_over():
            self._guard()
            filled = {"version": memory.version, "previous": memory.previous, "reason": memory.reason}
            argv = [_fill(word, filled) for word in self._commands[memory.kind]]
            with self._processes.held_lock() as lock:
                # A predecessor that was killed between starting the command and noting it left it at work.
                if lock is not None and self._processes.exit_code(memory.name) is None:
                    self._processes.start(memory.name, argv, lock)
        self._checkpoint("correction.started")
        self._keep(replace(memory, phase=RUNNING, started_at=now))
        self._checkpoint("correction.running")

    def _is_over(self) -> bool:
        """Whether the rollback has happened although nobody was there to note it."""
        if self.memory.kind != kinds.ROLLBACK:
            return False
        return kinds.live_version(self._store) not in (self.memory.version, None)

    def _outcome(self) -> tuple[str, str]:
        code, log = self._processes.exit_code(self.memory.name), self._processes.log_path(self.memory.name)
        if self.memory.kind == kinds.ROLLBACK:
            try:
                live = kinds.live_version(self._store)
            except ContractError as error:
                return "failed", str(error)
            if live == self.memory.previous:
                return "done", f"version {live} is live again"
            return "failed", f"version {live} is live; exit code {'unknown' if code is None else code}, see {log}"
        if code == 0:
            return "done", f"of version {self.memory.previous}"
        return "failed", f"exit code {'unknown' if code is None else code}, see {log}"

    def _end(self, outcome: str, reason: str) -> str:
        memory = self.memory
        kind = f"{memory.kind}_{outcome}"
        text = f"{memory.kind} from version {memory.version} {outcome}: {reason}"
        self._journal.tell(kind, text, version=memory.version, previous=memory.previous)
        self._keep(CorrectionMemory(done=memory.done), {kind: 1})
        self._checkpoint("correction.ended")
        return outcome

    def _keep(self, memory: CorrectionMemory, counts: dict[str, float] | None = None) -> None:
        self._documents.write_documents({CORRECTION: dataclasses.asdict(memory)}, counts)
        self.memory = memory


def _key(kind: str, version: int) -> str:
    return f"{kind}-v{version}"


def _parse(name: str, line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise ContractError(f"{name} is {line!r}: {error}") from error


def _fill(word: str, values: dict[str, object]) -> str:
    for name, value in values.items():
        word = word.replace("{" + name + "}", str(value))
    return word
