"""All sections of a recommender: their classes, and the check of all settings before a run.

A wrong setting is reported before the first step starts.
"""

from typing import Any

from evergreen.config.extraction import ExtractionSettings
from evergreen.config.features import Features
from evergreen.config.gate import GateSettings
from evergreen.config.model import NETWORKS, network_config
from evergreen.config.monitor import decision_settings, own_parts
from evergreen.config.preprocessing import PreprocessingSettings
from evergreen.config.reader import parse_settings
from evergreen.config.release import RolloutSettings
from evergreen.config.spec import Recommender
from evergreen.config.training import TrainingSettings
from evergreen.config.validation import ValidationSettings

_SECTION_CLASSES: dict[str, type[Any]] = {
    "extraction": ExtractionSettings,
    "validation": ValidationSettings,
    "preprocessing": PreprocessingSettings,
    "training": TrainingSettings,
    "gate": GateSettings,
    "release": RolloutSettings,
}
"""Sections whose settings are in a single dataclass, with this dataclass. The class of `model`
depends on its `kind` (`evergreen.config.model`), and `monitor` has several classes
(`evergreen.config.monitor.own_parts`)."""


def section_classes(section: str) -> list[type[Any]]:
    """Return the dataclasses whose fields are the settings of a section.

    The section `model` has a class for each network, and `monitor` has a class for each concern.
    """
    if section == "model":
        return list(NETWORKS.values())
    if section == "monitor":
        return list(own_parts().values())
    return [_SECTION_CLASSES[section]]


_ANY = Recommender(name="any", features=Features(numeric=("any",), categorical=("other",)))
"""Placeholder recommender for checking settings when the real recommender is not available."""


def check_settings(recommender: Recommender) -> None:
    """Check the settings in every section of a recommender.

    Raises:
        ContractError: a setting is unknown, of another type or out of range. The message names the
            setting by its path.
    """
    for name, kind in _SECTION_CLASSES.items():
        recommender.section(name, kind)
    network_config(recommender)
    decision_settings(recommender)


def check_changes(settings: str) -> None:
    """Check the settings of a run without access to its recommender in the model registry.

    Settings that the run does not change are assumed to have their defaults. Settings of `model`
    are only checked if the run sets `model.kind`, because they depend on the network.

    Raises:
        ContractError: a setting is unknown, of another type or out of range. The message names the
            setting by its path.
    """
    changes = parse_settings(settings)
    if "model.kind" not in changes:
        changes = {path: value for path, value in changes.items() if not path.startswith("model.")}
    check_settings(_ANY.with_settings(changes))
