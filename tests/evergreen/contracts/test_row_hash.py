"""Tests of row hashes: they equal SplitMix64, are evenly spread, and differ for another salt."""

import zlib

import numpy as np
import pytest

from evergreen.contracts.row_hash import mix, row_identities, uniforms

GAMMA = 0x9E3779B97F4A7C15


def test_hash_mixes_bits_like_splitmix64():
    """The expected numbers are the published output of SplitMix64 for seed 1234567."""
    state = [np.uint64((1234567 + i * GAMMA) % 2**64) for i in range(5)]
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [int(mix(each)) for each in state[:4]] == published
    np.testing.assert_array_equal(mix(np.array(state)), [mix(each) for each in state])


def test_number_of_row_depends_on_its_request_and_its_row():
    pa = pytest.importorskip("pyarrow")
    requests = ["a", "request-7", "a", "", "ü"]
    rows = np.array([0, 3, 1, 0, 2**31 - 1], np.int32)
    expected = [(zlib.crc32(name.encode()) << 32) | int(row) for name, row in zip(requests, rows)]
    assert row_identities(pa.array(requests), rows).tolist() == expected


def test_draws_are_even_and_independent_of_each_other_and_other_salts():
    requests, rows = np.divmod(np.arange(200_000, dtype=np.uint64), np.uint64(64))
    identities = (requests << np.uint64(32)) | rows
    draws, others = uniforms(identities, 1), uniforms(identities, 2)
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = np.bincount((draws * 100).astype(int), minlength=100)
    expected = len(draws) / 100
    chi_square = ((counts - expected) ** 2 / expected).sum()
    # The distribution has mean 99 and standard deviation sqrt(2 * 99).
    assert chi_square < 99 + 4 * np.sqrt(2 * 99)
    for one, other in ((draws, others), (draws[1:], draws[:-1]), (draws[64:], draws[:-64])):
        assert abs(np.corrcoef(one, other)[0, 1]) < 4 / np.sqrt(len(one))
