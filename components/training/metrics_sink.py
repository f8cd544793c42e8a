"""Where a fit's numbers go: JSON lines by default, TensorBoard beside them on demand, a list in tests.

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
    """Takes numbers by name and step."""

    def log(self, values: Mapping[str, float | None], step: int) -> None:
        """Takes the numbers of one step; None is a number that does not exist."""

    def close(self) -> None:
        """Releases what the sink holds."""


class JsonLinesSink:
    """Appends one JSON object per call to a file, which the first call creates with its folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def log(self, values: Mapping[str, float | None], step: int) -> None:
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
                f"metrics for TensorBoard need the package tensorboard, which this environment lacks: {error}"
            ) from error
        self._writer = Writer(str(folder))

    def log(self, values: Mapping[str, float | None], step: int) -> None:
        """See `MetricsSink`; each branch of a fit has curves of its own, since all count steps from the same one."""
        branch = values.get("branch")
        prefix = "" if branch is None else f"branch_{branch:.0f}/"
        for name, value in values.items():
            if name != "branch" and value is not None:
                self._writer.add_scalar(prefix + name, value, step)

    def close(self) -> None:
        """See `MetricsSink`."""
        self._writer.close()


class SeveralSinks:
    """Gives all numbers to each of several sinks; closing it closes them."""

    def __init__(self, sinks: Sequence[MetricsSink]) -> None:
        self._sinks = sinks

    def log(self, values: Mapping[str, float | None], step: int) -> None:
        """See `MetricsSink`."""
        for sink in self._sinks:
            sink.log(values, step)

    def close(self) -> None:
        """See `MetricsSink`."""
        for sink in self._sinks:
            sink.close()


class MemorySink:
    """Keeps what it was given, in `lines`."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float | None]] = []

    def log(self, values: Mapping[str, float | None], step: int) -> None:
        """See `MetricsSink`."""
        self.lines.append({"step": step, **values})

    def close(self) -> None:
        """See `MetricsSink`."""
