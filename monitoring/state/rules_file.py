"""Persist the monitor's rules in its state folder, so that an incident can include them."""

import json
from pathlib import Path

from evergreen.config.monitor import DecisionSettings
from evergreen.config.reader import flat_values, make_settings
from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import ContractError, TemporaryError

_RULES_FILE = "rules.json"


def write_rules(state: Path, settings: DecisionSettings) -> None:
    """Write the rules to the state folder.

    Raises:
        TemporaryError: The file cannot be written.
    """
    try:
        write_whole(state / _RULES_FILE, json.dumps(flat_values(settings), indent=2) + "\n")
    except OSError as error:
        raise TemporaryError(f"the settings cannot be written: {error}") from error


def read_rules(state: Path) -> DecisionSettings:
    """Read the rules with which the monitor of this state folder was last started.

    Raises:
        ContractError: The file is missing or was written by another version.
    """
    path = state / _RULES_FILE
    try:
        return make_settings(DecisionSettings, **json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, ContractError) as error:
        raise ContractError(
            f"{path} cannot be used: {error}; expected a monitor's state folder"
        ) from error
