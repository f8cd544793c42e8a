"""Where a fit's numbers go: three methods, JSON lines by default, TensorBoard beside them on demand, a list in tests.

A crash loses no line that was logged; a resumed fit appends to the same file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from components.runtime.durable import append_line
from components.runtime.errors import PermanentError


class MetricsSink(Protocol):
    """Takes numbers by name and step; None is a number that does not exist."""

    def log(self, name: str, value: float | None, step: int) -> None:
        """Takes one number."""

    def log_dict(self, values: Mapping[str, float | None], step: int) -> None:
        """Takes several numbers of one step."""

    def close(self) -> None:
        """Releases what the sink holds."""


class JsonLinesSink:
    """Appends one JSON object per call to a file."""

    def __init__(self, path: Path) -> None:
        """Appends to `path`, which is created with its folder by the first call."""
        self._path = path

    def log(self, name: str, value: float | None, step: int) -> None:
        """See `MetricsSink`."""
        self.log_dict({name: value}, step)

    def log_dict(self, values: Mapping[str, float | None], step: int) -> None:
        """See `MetricsSink`."""
        append_line(self._path, json.dumps({"step": step, **values}))

    def close(self) -> None:
        """See `MetricsSink`; nothing is held between calls."""


class TensorBoardSink:
    """Writes TensorBoard's event files; a line of `JsonLinesSink` is a point of each of its numbers there."""

    def __init__(self, folder: Path) -> None:
        """Opens a new event file in `folder`.

        Raises:
            PermanentError: the package `tensorboard` is not in this environment.
        """
        try:
            from tensorboard.summary import Writer
        except ImportError as error:
            raise PermanentError(
                f"metrics for TensorBoard need the package tensorboard, which this environment has not: {error}"
            ) from error
        self._writer = Writer(str(folder))

    def log(self, name: str, value: float | None, step: int) -> None:
        """See `MetricsSink`; a number that does not exist is no point."""
        if value is not None:
            self._writer.add_scalar(name, value, step)

    def log_dict(self, values: Mapping[str, float | None], step: int) -> None:
        """See `MetricsSink`; each branch of a fit has curves of its own, since all count steps from the same one."""
        branch = values.get("branch")
        prefix = "" if branch is None else f"branch_{branch:.0f}/"
        for name, value in values.items():
            if name != "branch":
                self.log(prefix + name, value, step)

    def close(self) -> None:
        """See `MetricsSink`."""
        self._writer.close()


class SeveralSinks:
    """Gives every number to each of several sinks."""

    def __init__(self, sinks: Sequence[MetricsSink]) -> None:
        """Takes the sinks over: closing this closes them."""
        self._sinks = sinks

    def log(self, name: str, value: float | None, step: int) -> None:
        """See `MetricsSink`."""
        for sink in self._sinks:
            sink.log(name, value, step)

    def log_dict(self, values: Mapping[str, float | None], step: int) -> None:
        """See `MetricsSink`."""
        for sink in self._sinks:
            sink.log_dict(values, step)

    def close(self) -> None:
        """See `MetricsSink`."""
        for sink in self._sinks:
            sink.close()


class MemorySink:
    """Keeps what it was given, in `lines`."""

    def __init__(self) -> None:
        """Starts empty."""
        self.lines: list[dict[str, float | None]] = []

    def log(self, name: str, value: float | None, step: int) -> None:
        """See `MetricsSink`."""
        self.log_dict({name: value}, step)

    def log_dict(self, values: Mapping[str, float | None], step: int) -> None:
        """See `MetricsSink`."""
        self.lines.append({"step": step, **values})

    def close(self) -> None:
        """See `MetricsSink`."""
