"""A reproducible number for each raw row, so that a repeated run draws the same rows.

Extraction uses the numbers to draw old rows and to find requests again. Preprocessing uses the
numbers to downsample the rows without a click. Each use of the numbers has its own salt.
"""

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray


def request_hashes(request_ids: Any) -> NDArray[np.uint32]:
    """Return the CRC-32 of each text of an Arrow array, [n].

    The result is the same in every process, unlike that of Python's `hash`.
    """
    return np.fromiter(
        map(zlib.crc32, request_ids.cast("binary").to_pylist()), np.uint32, len(request_ids)
    )


def row_identities(request_ids: Any, rows: NDArray[Any]) -> NDArray[np.uint64]:
    """Return a 64-bit identity of each row, [n].

    The upper 32 bits are the CRC-32 of the request id. The lower 32 bits are the row's number in
    its request.

    Args:
        request_ids: Arrow array of strings, [n]. pyarrow is not imported, because it is not a
            dependency of the contracts.
        rows: Number of each row in its request, [n].
    """
    requests = request_ids.dictionary_encode()
    hashes = request_hashes(requests.dictionary).astype(np.uint64)
    indexes = requests.indices.to_numpy(zero_copy_only=False)
    identities: NDArray[np.uint64] = (hashes[indexes] << np.uint64(32)) | rows.astype(
        np.uint32
    ).astype(np.uint64)
    return identities


def mix(values: Any) -> Any:
    """Mix the bits of integers: every bit of the input changes about half of the output's bits.

    The function is the output function of SplitMix64 (Steele, Lea, Flood 2014).

    Args:
        values: Array or scalar of uint64.
    """
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def uniforms(identities: NDArray[np.uint64], salt: int) -> NDArray[np.float64]:
    """Return a uniform random number in [0, 1) for each identity, [n].

    Different salts give independent numbers.

    >>> five, six = uniforms(np.array([5, 6], np.uint64), salt=1)
    >>> bool(five == six), bool(five == uniforms(np.array([5], np.uint64), salt=1)[0])
    (False, True)
    """
    hashes = mix(identities ^ mix(np.uint64(salt % 2**64)))
    # float64 represents the upper 53 bits exactly. If all 64 bits were converted, the result could
    # be rounded up to 1.
    evenly: NDArray[np.float64] = (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return evenly
