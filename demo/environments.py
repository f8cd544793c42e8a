"""Locate the virtual environments of the images and of the benchmarks' baselines.

`make environments` builds the environments from their locks in `requirements/`. Each lock has an
`.in` file, which lists its direct dependencies.
"""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def python_of(environment: str, repository: Path = REPOSITORY) -> Path:
    """Return the path of the interpreter of `environment`."""
    return repository / ".venvs" / environment / "bin" / "python"
