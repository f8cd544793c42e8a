"""The memory that a model is served from: the sizes of MIG slices, and how a target is named.

What a model takes of it is `memory`'s.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from components.runtime.errors import ContractError

MIB, GIB = 2**20, 2**30

MIG_SLICES = {
    "1g.5gb": 4.75, "2g.10gb": 9.62, "3g.20gb": 19.5, "4g.20gb": 19.5, "7g.40gb": 39.25,
    "1g.10gb": 9.5, "1g.20gb": 19.5, "2g.20gb": 19.5, "3g.40gb": 39.25, "4g.40gb": 39.25, "7g.80gb": 78.75,
    "1g.6gb": 5.81, "2g.12gb": 11.69, "4g.24gb": 23.44,
}  # fmt: skip
"""GiB of each MIG profile of A100 40 GB, of A100 and H100 80 GB, and of A30, as `nvidia-smi mig -lgip` tells them;
where cards or drivers differ, the least."""

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(Ki|Mi|Gi|Ti|k|M|G|T|)")
_UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@dataclass(frozen=True)
class Target:
    """Memory to serve from."""

    name: str
    num_bytes: int
    is_gpu: bool


def parse_target(target: str) -> Target:
    """What `target` names: a MIG slice (`mig-1g.5gb`), a GPU (`gpu-24Gi`), or a server's memory (`16Gi`).

    Raises:
        ContractError: it is none of these.

    >>> parse_target("mig-1g.5gb").num_bytes / 2**30, parse_target("512Mi").num_bytes
    (4.75, 536870912)
    """
    name = target.removeprefix("nvidia.com/")
    if (slice_gib := MIG_SLICES.get(name.removeprefix("mig-"))) is not None:
        return Target(target, int(slice_gib * GIB), True)
    if found := _SIZE.fullmatch(name.removeprefix("gpu-")):
        return Target(target, int(float(found[1]) * _UNITS[found[2]]), name.startswith("gpu-"))
    slices = ", ".join(f"mig-{known}" for known in MIG_SLICES)
    raise ContractError(f"target {target!r} is unknown, expected a size (16Gi), a GPU's (gpu-24Gi) or one of {slices}")


def readable(num_bytes: int) -> str:
    """The size in GiB or MiB."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"
