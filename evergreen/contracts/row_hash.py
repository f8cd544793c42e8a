"""A reproducible number for each raw row, so that every try draws the same rows.

Extraction uses it to draw old rows and to find requests again. Preprocessing uses it to keep a
share of the rows without a click. Each chooses its own salt.
"""

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray


def request_hashes(request_ids: Any) -> NDArray[np.uint32]:
    """Return the CRC-32 of each text of an Arrow array, [n].

    It is the same in every process, unlike Python's own hashes.
    """
    return np.fromiter(
        map(zlib.crc32, request_ids.cast("binary").to_pylist()), np.uint32, len(request_ids)
    )


def row_identities(request_ids: Any, rows: NDArray[Any]) -> NDArray[np.uint64]:
    """Return the CRC-32 of each row's request id in the upper half and its row in the lower, [n].

    Args:
        request_ids: Arrow array of strings, [n]. pyarrow is not imported, because it is not a
            dependency of the contracts.
        rows: `row` of each, [n].
    """
    requests = request_ids.dictionary_encode()
    hashes = request_hashes(requests.dictionary).astype(np.uint64)
    places = requests.indices.to_numpy(zero_copy_only=False)
    identities: NDArray[np.uint64] = (hashes[places] << np.uint64(32)) | rows.astype(
        np.uint32
    ).astype(np.uint64)
    return identities


def mix(values: Any) -> Any:
    """Mix the bits of integers: every bit of the input changes about half of the output's bits.

    This is SplitMix64's output function (Steele, Lea, Flood 2014).

    Args:
        values: uint64, an array or a scalar.
    """
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def uniforms(identities: NDArray[np.uint64], salt: int) -> NDArray[np.float64]:
    """Return a uniform number in [0, 1) for each identity, [n].

    Numbers of different salts are independent.

    >>> five, six = uniforms(np.array([5, 6], np.uint64), salt=1)
    >>> bool(five == six), bool(five == uniforms(np.array([5], np.uint64), salt=1)[0])
    (False, True)
    """
    hashes = mix(identities ^ mix(np.uint64(salt % 2**64)))
    # The upper 53 bits are exact in float64. Rounding all 64 bits could give 1.
    evenly: NDArray[np.float64] = (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return evenly
