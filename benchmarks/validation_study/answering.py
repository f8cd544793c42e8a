"""A contestant's side of the pipe: one question per line of standard input, one answer per line of standard output.

A question names two folders of raw Parquet files, the window before and the window now, and the columns asked about;
an answer says which features were alarmed, by each of the contestant's settings, and how long it took. Each contestant
runs in the environment that it needs, so this side asks for the standard library only; the other is `contestants`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

Judge = Callable[[Path, Path, "tuple[str, ...]"], "dict[str, list[str]]"]
"""(folder before, folder now, columns) -> features that were alarmed, by the name of the setting. `columns` are all
that is asked about, empty = all: whoever judges them one by one may leave out the others."""


def answer(judge: Judge) -> None:
    """Answers until the input ends."""
    # What a library prints must not stand between the answers.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        question = json.loads(line)
        began = time.perf_counter()
        alarms = judge(Path(question["before"]), Path(question["now"]), tuple(question["columns"]))
        print(json.dumps({"alarms": alarms, "seconds": time.perf_counter() - began}), file=replies, flush=True)
