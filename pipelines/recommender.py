"""Whether every room can read its section of a recommender: asked before a run, so that nobody waits for a wrong word.

The classes of the sections are their rooms'; which run has which description is `store.recommenders`'.
"""

from pathlib import Path
from typing import Any

from components.contracts.features import Features
from components.contracts.recommender import Recommender, parse_settings
from components.deployment.settings import RolloutSettings
from components.evaluation.settings import GateSettings
from components.extraction.settings import ExtractionSettings
from components.models.configs import NETWORKS, network_config
from components.preprocessing.settings import PreprocessingSettings
from components.store.recommenders import accepted
from components.training.config import TrainingSettings
from components.validation.rules import ValidationSettings
from monitoring.backtest.settings import judging_settings, own_parts

SECTION_CLASSES: dict[str, type[Any]] = {
    "extraction": ExtractionSettings,
    "validation": ValidationSettings,
    "preprocessing": PreprocessingSettings,
    "training": TrainingSettings,
    "gate": GateSettings,
    "release": RolloutSettings,
}
"""Of the sections that one dataclass reads. `model` is read by the class of its `kind` (`components.models.configs`),
`monitor` by `monitoring.backtest.settings.own_parts`."""


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


def check_run(store: Path, *, reference: str, settings: str) -> Recommender:
    """The description by which a run with these two parameters would work, checked.

    Raises:
        ContractError: there is no such description, or a room cannot read its section.
    """
    recommender = accepted(store, reference).with_settings(parse_settings(settings))
    check_settings(recommender)
    return recommender
