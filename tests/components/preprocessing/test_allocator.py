"""The allocator keeps what was freed: seen by the kernel, which is asked for a page once and not every time."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from components.preprocessing import encode, feature_graph
from components.runtime import allocator

REPOSITORY = Path(__file__).resolve().parents[3]
ROUNDS, ARRAYS, MEGABYTES = 5, 32, 2

FAULTS = """
import resource, sys
import numpy as np
from components.runtime.allocator import give_back_freed_memory, keep_freed_memory
how, rounds, arrays, megabytes = sys.argv[1], *map(int, sys.argv[2:])
if how != "as ever":
    assert keep_freed_memory(1 << 30)
def partition():
    return [np.ones(megabytes << 17) for _ in range(arrays)]
partition()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(rounds):
    if how == "given back":
        assert give_back_freed_memory()
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


def test_what_was_kept_is_given_back_when_asked_for():
    assert bytes_faulted("given back") > (ROUNDS - 1) * ARRAYS * MEGABYTES << 20


def test_the_fits_memory_is_given_back_before_processes_are_forked_to_encode(
    raw_table, write_raw, run_step, monkeypatch
):
    done = []

    def noting(module, name):
        function = getattr(module, name)

        def noted(*arguments, **options):
            done.append(name)
            return function(*arguments, **options)

        monkeypatch.setattr(module, name, noted)

    noting(feature_graph, "next_workflow")
    noting(allocator, "give_back_freed_memory")
    noting(encode, "encode_parts")
    run_step(write_raw(raw_table(300)))
    assert done == ["next_workflow", "give_back_freed_memory", "encode_parts"]


class OtherLibrary:
    """A C library without `mallopt` and `malloc_trim`, as musl is."""

    def __getattr__(self, name):
        raise AttributeError(f"undefined symbol: {name}")


def no_library(_):
    raise OSError("no library")


@pytest.mark.parametrize("load", [no_library, lambda _: OtherLibrary()])
def test_a_c_library_that_does_not_know_it_is_left_as_it_is(monkeypatch, load):
    monkeypatch.setattr(ctypes, "CDLL", load)
    assert allocator.keep_freed_memory() is False
    assert allocator.give_back_freed_memory() is False
