"""Tests of a model's files: safetensors reads them, and invalid files are refused."""

import errno
import os
import tracemalloc

import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from evergreen.networks.files import (
    OPTIMIZER_FILE,
    TABLE,
    WEIGHTS_FILE,
    add_to_bias,
    chunks,
    new_model,
    open_model,
)
from evergreen.runtime.errors import ContractError, PermanentError
from tests.support.errors import raises

SIZES = [3, 5, 4]
SHAPES = {TABLE: (12, 4), "tower.0.weight": (2, 6), "bias": (1,)}


def filled(folder, *, step=7, with_moments=True, seed=0):
    """Write a model of random numbers.

    Returns:
        For each part of the model, its arrays by name.
    """
    random = np.random.default_rng(seed)
    expected = []
    with new_model(folder, SHAPES, step=step, with_moments=with_moments) as stored:
        for tensors in stored.parts:
            for values in (tensors.table, *tensors.dense.values()):
                values[:] = random.normal(size=values.shape)
            expected.append(
                {TABLE: tensors.table.copy(), **{n: v.copy() for n, v in tensors.dense.items()}}
            )
    return expected


def test_library_reads_what_was_written_under_promised_names(tmp_path):
    weights, first, second = filled(tmp_path)
    of_library = safetensors_numpy.load_file(tmp_path / WEIGHTS_FILE)
    assert of_library.keys() == SHAPES.keys()
    for name, values in of_library.items():
        np.testing.assert_array_equal(values, weights[name])
    state = safetensors_numpy.load_file(tmp_path / OPTIMIZER_FILE)
    assert len(state) == 2 * len(SHAPES)
    for name in SHAPES:
        np.testing.assert_array_equal(state[f"{name}.exp_avg"], first[name])
        np.testing.assert_array_equal(state[f"{name}.exp_avg_sq"], second[name])


def test_model_that_library_wrote_is_read(tmp_path):
    tensors = {
        name: np.full(shape, i + 1, np.float32) for i, (name, shape) in enumerate(SHAPES.items())
    }
    safetensors_numpy.save_file(tensors, tmp_path / WEIGHTS_FILE)
    stored = open_model(tmp_path, SIZES)
    assert (stored.moments, stored.step, stored.shapes) == (None, 0, SHAPES)
    np.testing.assert_array_equal(stored.weights.table, tensors[TABLE])


@pytest.mark.parametrize("with_moments", [True, False])
def test_opened_model_equals_written_one_and_changes_of_it_reach_no_file(tmp_path, with_moments):
    expected = filled(tmp_path, with_moments=with_moments)
    stored = open_model(tmp_path, SIZES)
    assert stored.step == (7 if with_moments else 0)
    assert len(stored.parts) == (3 if with_moments else 1)
    for tensors, values in zip(stored.parts, expected):
        np.testing.assert_array_equal(tensors.table, values[TABLE])
        for name, value in tensors.dense.items():
            np.testing.assert_array_equal(value, values[name])
        tensors.table[:] = 9
    assert not (open_model(tmp_path, SIZES).weights.table == 9).any()


def truncated(path):
    path.write_bytes(path.read_bytes()[:-4])


def oversized(path):
    path.write_bytes(path.read_bytes() + bytes(4))


def of_halves(path):
    tensors = {
        name: each.astype(np.float16) for name, each in safetensors_numpy.load_file(path).items()
    }
    safetensors_numpy.save_file(tensors, path, {"step": "7"})


def lacking(name):
    def spoil(path):
        tensors = safetensors_numpy.load_file(path)
        del tensors[name if name in tensors else f"{name}.exp_avg"]
        safetensors_numpy.save_file(tensors, path, {"step": "7"})

    return spoil


@pytest.mark.parametrize("spoil", [os.unlink, truncated, oversized, of_halves, lacking(TABLE)])
@pytest.mark.parametrize("name", [WEIGHTS_FILE, OPTIMIZER_FILE])
def test_corrupt_file_is_refused_by_name(tmp_path, name, spoil):
    filled(tmp_path)
    if (name, spoil) == (OPTIMIZER_FILE, os.unlink):
        return  # A model without optimizer state is also valid.
    spoil(tmp_path / name)
    with pytest.raises(ContractError, match=name):
        open_model(tmp_path, SIZES)


def test_table_with_other_rows_than_ids_is_refused(tmp_path):
    filled(tmp_path)
    with raises(ContractError, (12, 4), "expected 13 rows"):
        open_model(tmp_path, [3, 5, 5])


def test_optimizer_file_without_its_step_is_refused(tmp_path):
    filled(tmp_path)
    path = tmp_path / OPTIMIZER_FILE
    safetensors_numpy.save_file(safetensors_numpy.load_file(path), path)
    with raises(ContractError, "step None", "whole number"):
        open_model(tmp_path, SIZES)


def test_bias_moves_and_returns_within_rounding_errors(tmp_path):
    weights, *_ = filled(tmp_path)
    for rate in (0.1, 0.37, 1e-6):
        add_to_bias(tmp_path, np.log(rate))
        moved = open_model(tmp_path, SIZES).weights.dense["bias"]
        np.testing.assert_allclose(moved, weights["bias"] + np.log(rate), rtol=1e-6)
        add_to_bias(tmp_path, -np.log(rate))
    assert abs(open_model(tmp_path, SIZES).weights.dense["bias"] - weights["bias"]) < 3 * 2e-6
    np.testing.assert_array_equal(open_model(tmp_path, SIZES).weights.table, weights[TABLE])


def test_full_disk_is_error_and_no_bus_error(tmp_path, monkeypatch):
    def full(descriptor, offset, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with (
        raises(PermanentError, "bytes", "No space left"),
        new_model(tmp_path, SHAPES),
    ):
        pass


def test_neither_writing_nor_reading_holds_table_in_memory(tmp_path):
    shapes = {TABLE: (400_000, 16), "bias": (1,)}
    tracemalloc.start()
    try:
        with new_model(tmp_path, shapes) as stored:
            for part in chunks(0, 400_000):
                for tensors in stored.parts:
                    tensors.table[part] = 1
        assert open_model(tmp_path, [400_000]).moments[1].table[399_999, 15] == 1
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 400_000 * 16 * 4 / 10
