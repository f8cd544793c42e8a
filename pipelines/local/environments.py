"""Where the virtual environments are: one per image, and one per set of peers that a benchmark measures against.

`make environments` builds them from their locks in `requirements/`; the `.in` files say which packages a lock holds.
"""

from __future__ import annotations

from pathlib import Path

ENVIRONMENTS = ("driver", "validation", "preprocessing", "training", "serving")
"""Of the images."""
BENCHMARKS = "benchmarks"
"""Holds what training is measured against."""
SERVING_PEERS = "serving-peers"
"""Holds what serving is measured against."""
ON_DEMAND = (BENCHMARKS, SERVING_PEERS)
"""Built by the benchmarks that need them, and without tests of their own."""
REPOSITORY = Path(__file__).resolve().parents[2]


def python_of(environment: str, repository: Path = REPOSITORY) -> Path:
    """The interpreter of `environment`."""
    return repository / ".venvs" / environment / "bin" / "python"


def locks_of(environment: str, repository: Path = REPOSITORY) -> list[Path]:
    """The lock of the image, then that of what tests need on top."""
    kinds = ("",) if environment in ON_DEMAND else ("", ".test")
    return [repository / "requirements" / f"{environment}{kind}.lock" for kind in kinds]
