"""What the demo shows while it runs: a bar per stage, and one line per transition."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class Screen:
    """The terminal: bars where it is one, plain lines where it is not."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self._started = time.monotonic()
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description:<34}"),
            BarColumn(bar_width=28),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=self.console,
            transient=False,
            disable=not self.console.is_terminal,
        )
        self._task: TaskID | None = None
        self.seconds: dict[str, float] = {}
        """Seconds of each finished stage, by name."""

    @contextmanager
    def running(self) -> Iterator[Screen]:
        """Shows the bars while the body runs."""
        with self._progress:
            yield self

    def say(self, text: str, style: str = "") -> None:
        """One line, with the time since the start; brackets in `text` stay what they are."""
        elapsed = time.monotonic() - self._started
        # Lines are not wrapped: a log file has no width, and a terminal wraps by itself.
        line = f"[dim]{elapsed:6.1f} s[/dim]  {escape(text)}"
        self._progress.console.print(line, style=style or None, soft_wrap=True)

    @contextmanager
    def stage(self, name: str, title: str, total: float = 1.0) -> Iterator[None]:
        """One stage: its bar, its title as a line, and its seconds."""
        self.say(title, "bold")
        self._task = self._progress.add_task(title, total=total, note="")
        started = time.monotonic()
        try:
            yield
            self._progress.update(self._task, completed=total, note="")
        finally:
            self.seconds[name] = round(time.monotonic() - started, 2)

    def advance(self, completed: float, note: str = "") -> None:
        """Moves the current stage's bar."""
        if self._task is not None:
            self._progress.update(self._task, completed=completed, note=note)
