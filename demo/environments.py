"""Where the virtual environments are: one per image, and one per set of peers that a benchmark measures against.

`make environments` builds them from their locks in `requirements/`; the `.in` files say which packages a lock holds.
"""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def python_of(environment: str, repository: Path = REPOSITORY) -> Path:
    """The interpreter of `environment`."""
    return repository / ".venvs" / environment / "bin" / "python"
