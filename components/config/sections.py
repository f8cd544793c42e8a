"""All sections of a recommender: their classes, and the check of a description before a run.

A wrong setting is found before the first step starts, not in the step that reads it.
"""

from typing import Any

from components.config.extraction import ExtractionSettings
from components.config.features import Features
from components.config.gate import GateSettings
from components.config.model import NETWORKS, network_config
from components.config.monitor import judging_settings, own_parts
from components.config.preprocessing import PreprocessingSettings
from components.config.reader import parse_settings
from components.config.release import RolloutSettings
from components.config.spec import Recommender
from components.config.training import TrainingSettings
from components.config.validation import ValidationSettings

SECTION_CLASSES: dict[str, type[Any]] = {
    "extraction": ExtractionSettings,
    "validation": ValidationSettings,
    "preprocessing": PreprocessingSettings,
    "training": TrainingSettings,
    "gate": GateSettings,
    "release": RolloutSettings,
}
"""Of the sections that one dataclass reads. `model` is read by the class of its `kind` (`config.model`),
`monitor` by those of `config.monitor.own_parts`."""


def section_classes(section: str) -> list[type[Any]]:
    """The dataclasses whose fields are the section's settings: of `model` one per network, of `monitor` its parts."""
    if section == "model":
        return list(NETWORKS.values())
    if section == "monitor":
        return list(own_parts().values())
    return [SECTION_CLASSES[section]]


_ANY = Recommender(name="any", features=Features(numeric=("any",), categorical=("other",)))
"""Stands for a recommender that is not at hand."""


def check_settings(recommender: Recommender) -> None:
    """Returns if every room can read its section.

    Raises:
        ContractError: a setting is unknown, of another type or out of range; the message has its path.
    """
    for name, kind in SECTION_CLASSES.items():
        recommender.section(name, kind)
    network_config(recommender)
    judging_settings(recommender)


def check_changes(settings: str) -> None:
    """Returns if the settings of a run can be read, where its store, and so its recommender, is not at hand.

    Each section is judged by its defaults. `model` is left out where the settings do not name its kind.

    Raises:
        ContractError: a setting is unknown, of another type or out of range; the message has its path.
    """
    changes = parse_settings(settings)
    if "model.kind" not in changes:
        changes = {path: value for path, value in changes.items() if not path.startswith("model.")}
    check_settings(_ANY.with_settings(changes))
