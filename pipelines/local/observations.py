"""What the demo sees of its processes: the JSON lines and notes that they leave.

Reads only; a last line still being written does not count. Who writes what: the monitor its timeline and events, the
replay its statistics, each pipeline step its note.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from components.store.run_notes import StepNote, read_notes


class JsonLines:
    """A growing file of JSON lines, read on from where the last call stopped."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.lines: list[dict[str, Any]] = []

    def update(self) -> list[dict[str, Any]]:
        """The lines that came since the last call; all lines are in `lines`."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        new = [json.loads(line) for line in whole.splitlines() if line.strip()]
        self.lines += new
        return new


class RunWatch:
    """The steps of the runs in a model store, as they start and end."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._seen: dict[tuple[str, str], str] = {}

    def update(self) -> list[tuple[str, StepNote]]:
        """(run, note) of each step whose state changed since the last call."""
        changed = []
        runs = sorted(p.name for p in (self._store / "runs").glob("*")) if self._store.exists() else []
        for run in runs:
            for note in read_notes(self._store, run):
                if self._seen.get((run, note.step)) != note.state:
                    self._seen[run, note.step] = note.state
                    changed.append((run, note))
        return changed


def last_word(log: Path) -> str:
    """The last line that a process wrote to its log."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no word"


def printed_json(log: Path) -> Any:
    """The JSON that a process printed; it is indented, and warnings may stand before it."""
    lines = log.read_text(errors="replace").splitlines()
    start = next((n for n, line in enumerate(lines) if line in ("{", "[")), 0)
    return json.loads("\n".join(lines[start:]))


def describe(note: StepNote) -> str:
    """One line about a step that ended: its time and what a person asks first."""
    facts = note.facts
    known = {
        "extraction": "{train_rows:,} rows to learn from, {holdout_rows:,} held out, {malformed:,} malformed",
        "validation": "{decision}, {num_warnings} warnings over {num_rows:,} rows",
        "preprocessing": "{ids:,} ids, {new_categories:,} of them new",
        "training": "auc {stopping_auc:.4f} on its newest rows, {rows_per_second:,.0f} rows/s",
        "deployment": "version {version} serves, parity {parity_max_abs_diff:.1e} over {parity_rows:,} rows",
    }
    text = note.reason
    if note.state == "done":
        with contextlib.suppress(KeyError, ValueError, TypeError):  # a fact is absent or None
            text = known[note.step].format(**facts)
    return f"{note.step} {note.state} in {note.seconds or 0:.1f} s" + (f": {text}" if text else "")
