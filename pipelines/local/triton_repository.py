"""What a model repository must hold before a Triton is started over it: said in words, instead of a start that hangs.

Only versions that a configuration names count: others are unfinished, withdrawn or waiting, and Triton passes over
them too. What the files mean is deployment's.
"""

from __future__ import annotations

from pathlib import Path

from components.contracts.serving import CANARY_NAME, MODEL_NAME
from components.deployment.graph.files import GRAPH_FILE
from components.deployment.repository.files import CODE_FILE
from components.deployment.repository.model_repository import CONFIG_FILE
from components.deployment.repository.triton_config import PYTHON, versions_of
from components.runtime.errors import ContractError


def models_to_load(repository: Path) -> list[str]:
    """The models that a server over `repository` loads at its start: those that have a configuration."""
    return [name for name in (MODEL_NAME, CANARY_NAME) if (repository / name / CONFIG_FILE).exists()]


def check_repository(repository: Path) -> None:
    """Returns if Triton can start with what `repository` holds, which may be nothing.

    Raises:
        ContractError: a configured version is absent or lacks a file, which would hang the start; names it.
    """
    for name in models_to_load(repository):
        text = (repository / name / CONFIG_FILE).read_text()
        needed = (GRAPH_FILE, CODE_FILE) if f'backend: "{PYTHON}"' in text else (GRAPH_FILE,)
        for version in versions_of(text):
            for file in (repository / name / str(version) / each for each in needed):
                if not file.exists():
                    raise ContractError(f"{file} is absent, expected in every version that {CONFIG_FILE} names")
