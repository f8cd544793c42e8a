"""The allocator keeps what was freed: seen by the kernel, which is asked for a page once and not every time."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from components.preprocessing import allocator

REPOSITORY = Path(__file__).resolve().parents[3]
ROUNDS, ARRAYS, MEGABYTES = 5, 32, 2

FAULTS = """
import resource, sys
import numpy as np
from components.preprocessing.allocator import keep_freed_memory
how, rounds, arrays, megabytes = sys.argv[1], *map(int, sys.argv[2:])
if how == "kept":
    assert keep_freed_memory()
def partition():
    return [np.ones(megabytes << 17) for _ in range(arrays)]
partition()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(rounds):
    partition()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize())
"""


def bytes_faulted(how):
    """What the kernel handed out, page by page, to rounds that each make `ARRAYS` arrays and free them all."""
    command = [sys.executable, "-c", FAULTS, how, *map(str, (ROUNDS, ARRAYS, MEGABYTES))]
    return int(subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout)


def test_a_partitions_arrays_take_the_pages_of_the_one_before():
    of_a_round = ARRAYS * MEGABYTES << 20
    assert bytes_faulted("kept") < of_a_round
    assert bytes_faulted("as ever") > (ROUNDS - 1) * of_a_round


class OtherLibrary:
    """A C library without `mallopt`, as musl is."""

    def __getattr__(self, name):
        raise AttributeError(f"undefined symbol: {name}")


def no_library(_):
    raise OSError("no library")


@pytest.mark.parametrize("load", [no_library, lambda _: OtherLibrary()])
def test_a_c_library_that_does_not_know_it_is_left_as_it_is(monkeypatch, load):
    monkeypatch.setattr(ctypes, "CDLL", load)
    assert allocator.keep_freed_memory() is False
