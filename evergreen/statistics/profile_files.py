"""Files of table profiles: NumPy's .npz, with JSON in `head` and arrays for each column.

Equal profiles give equal bytes. Reading a profile runs no code. Each array has a CRC-32.
"""

import io
import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import ContractError
from evergreen.statistics.column_profile import DENSE_EDGES, ColumnProfile, RowTotal, TableProfile


def write_profiles(
    path: Path,
    profiles: Sequence[TableProfile],
    *,
    kind: str,
    version: int,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write profiles to a file atomically.

    Args:
        path: The file.
        profiles: The profiles. The reader returns them in the same order.
        kind: Kind of the file.
        version: Format version of this kind of file.
        more: Additional JSON values in the file, depending on `kind`.
    """
    head = {
        "kind": kind,
        "format_version": version,
        "dense_edges": DENSE_EDGES.tolist(),
        "windows": [],
        **(more or {}),
    }
    arrays: dict[str, Any] = {}
    for number, profile in enumerate(profiles):
        columns = {name: _plain_fields(column) for name, column in profile.columns.items()}
        head["windows"].append({**_plain_fields(profile), "columns": columns})
        for name, column in profile.columns.items():
            arrays[f"{number}/{name}/sums"] = column.sums
            if column.values is not None:
                arrays[f"{number}/{name}/values"] = column.values
    content = io.BytesIO()
    np.savez_compressed(content, head=np.frombuffer(json.dumps(head).encode(), np.uint8), **arrays)
    write_whole(path, content.getvalue())


def _plain_fields(profile: ColumnProfile | TableProfile) -> dict[str, Any]:
    """Return the fields that can be stored as plain JSON values."""
    names = [
        field.name for field in fields(profile) if field.name not in ("columns", "values", "sums")
    ]
    return {name: getattr(profile, name) for name in names}


def read_profiles(
    path: Path, *, kind: str, version: int
) -> tuple[tuple[TableProfile, ...], dict[str, Any]]:
    """Return the profiles in a file, and the file's JSON head.

    Raises:
        ContractError: The file is absent or corrupt, or has another kind, version or bucket edges.
    """
    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        head = json.loads(arrays["head"].tobytes())
        if (head["kind"], head["format_version"]) != (kind, version):
            raise ContractError(
                f"{path} is {head['kind']} version {head['format_version']}, expected {kind} "
                f"version {version}"
            )
        edges = np.array(head["dense_edges"])
        # The last digits of powers differ between versions of NumPy.
        if edges.shape != DENSE_EDGES.shape or not np.allclose(edges, DENSE_EDGES, rtol=1e-9):
            raise ContractError(f"{path} has other bucket edges than this version expects")
        return tuple(
            _make_profile(each, arrays, number) for number, each in enumerate(head["windows"])
        ), head
    except OSError as error:
        raise ContractError(f"{path} cannot be read: {error.strerror or error}") from error
    except (
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
    ) as error:
        raise ContractError(f"{path} holds no {kind}: {error!r}") from error


def _make_profile(
    head: dict[str, Any], arrays: dict[str, NDArray[Any]], number: int
) -> TableProfile:
    columns = {}
    for name, known in head.pop("columns").items():
        values, sums = arrays.get(f"{number}/{name}/values"), arrays[f"{number}/{name}/sums"]
        if sums.shape != (len(DENSE_EDGES) - 1 if values is None else len(values), 3):
            raise ValueError(f"sums of {name} have shape {sums.shape}, expected 3 for each cell")
        columns[name] = ColumnProfile(
            values=values, sums=sums, missing=RowTotal(*known.pop("missing")), **known
        )
    return TableProfile(clicks=RowTotal(*head.pop("clicks")), columns=columns, **head)
