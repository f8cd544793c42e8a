"""The settings by which a monitor decides, in its state folder for whoever records an incident of it."""

import json
from pathlib import Path

from evergreen.config.monitor import JudgingSettings
from evergreen.config.reader import flat_values, make_settings
from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import ContractError, TemporaryError

JUDGING_FILE = "judging.json"


def write_judging(state: Path, settings: JudgingSettings) -> None:
    """Keep the settings in a monitor's state folder, for whoever records an incident of it.

    Raises:
        TemporaryError: the file cannot be written.
    """
    try:
        write_whole(state / JUDGING_FILE, json.dumps(flat_values(settings), indent=2) + "\n")
    except OSError as error:
        raise TemporaryError(f"the settings cannot be written: {error}") from error


def read_judging(state: Path) -> JudgingSettings:
    """The settings that the monitor of this state folder was started with last.

    Raises:
        ContractError: there are none, or they are another version's.
    """
    path = state / JUDGING_FILE
    try:
        return make_settings(JudgingSettings, **json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, ContractError) as error:
        raise ContractError(f"{path} cannot be used: {error}; expected a monitor's state folder") from error
