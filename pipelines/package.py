"""The compiled pipeline as a file: which parameters it takes.

Asked before a run, so that a wrong name is told at once and not by a server or a traceback. Writing the file is
`pipelines.compile`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from components.contracts.errors import ContractError


def check_parameters(package: Path, parameters: Mapping[str, Any]) -> None:
    """Refuses parameters that the compiled pipeline does not take.

    Raises:
        ContractError: the package is absent or no compiled pipeline, or a parameter is not the pipeline's.
    """
    try:
        document = next(iter(yaml.safe_load_all(package.read_text())))
        known = document["root"]["inputDefinitions"]["parameters"].keys()
    except OSError as error:
        raise ContractError(f"package {package} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, StopIteration, KeyError, TypeError, ValueError) as error:
        raise ContractError(
            f"package {package} is no compiled pipeline, expected one of `evergreen compile`"
        ) from error
    if unknown := sorted(parameters.keys() - known):
        raise ContractError(f"parameter {unknown[0]} is unknown, expected some of {', '.join(sorted(known))}")
