"""Content of a recommender's file: name, features, and the settings that differ from the defaults.

Extraction copies the description into its manifest, and every later manifest repeats it. Each step
therefore finds its section of the description in its input manifest. `cli.recommender` reads a
recommender's file, and `registry.recommenders` stores accepted recommenders.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from evergreen.config.data import OWN_COLUMNS, WEIGHT, ColumnNames
from evergreen.config.features import Features
from evergreen.config.reader import nearest, read_mapping
from evergreen.runtime.errors import ContractError

SECTIONS = (
    "extraction",
    "validation",
    "preprocessing",
    "model",
    "training",
    "gate",
    "release",
    "monitor",
)
"""Names of all sections. Each section is read by the package with the same name. Three sections
have other readers: `evergreen.networks` reads `model`, evaluation reads `gate`, and deployment
reads `release`."""
CANDIDATE_SUFFIX, CANARY_SUFFIX = "_candidate", "_canary"
"""Suffixes of the model names under which candidates and canaries are served."""
_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Recommender:
    """Content of a recommender's file.

    Raises:
        ContractError: the name is invalid, a feature has the name of the label or of another
            standard column, or a section is unknown or not a mapping.
    """

    name: str
    """Name of the served model, and label of its metrics."""
    features: Features
    data: ColumnNames = ColumnNames()
    """Names of the standard columns in the user's files."""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings that differ from the defaults, by section (`SECTIONS`) and name."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ContractError(
                f"recommender name is {self.name!r}, expected a letter, then up to 62 letters, "
                "digits or underscores, "
                "lower case"
            )
        if self.name.endswith((CANDIDATE_SUFFIX, CANARY_SUFFIX)):
            raise ContractError(
                f"recommender name is {self.name!r}, expected no suffix {CANDIDATE_SUFFIX} or "
                f"{CANARY_SUFFIX}, "
                "which names other models of a recommender"
            )
        if taken := sorted(set(self.features.names) & set(OWN_COLUMNS)):
            raise ContractError(
                f"features {taken} have the names of columns that every row has, expected other "
                "names"
            )
        if self.data.label in self.features.names:
            raise ContractError(
                f"feature {self.data.label!r} is the label, expected only features that are known "
                "before the label"
            )
        if self.data.weight is not None and (
            taken := sorted({self.data.weight, WEIGHT} & set(self.features.names))
        ):
            raise ContractError(
                f"features {taken} have the name of the weight column, expected other names"
            )
        categorical = self.features.categorical
        for role in ("user", "item"):
            if (name := getattr(self.data, role)) is not None and name not in categorical:
                near = nearest(name, categorical)
                raise ContractError(
                    f"data.{role} is {name!r}, which is not a categorical feature{near}"
                )
        for section, values in self.settings.items():
            if section not in SECTIONS:
                raise ContractError(f"{section} is not a section{nearest(section, SECTIONS)}")
            if not isinstance(values, dict):
                raise ContractError(f"section {section} is {values!r}, expected settings by name")

    def dumps(self) -> bytes:
        """Return the description as canonical JSON.

        Equal recommenders give equal bytes, whatever the order of keys in their files.
        """
        return json.dumps(
            dataclasses.asdict(self), sort_keys=True, allow_nan=False, separators=(",", ":")
        ).encode()

    @classmethod
    def loads(cls, content: bytes, *, source: str) -> "Recommender":
        """Return the recommender from the bytes that `dumps` wrote.

        Args:
            content: The bytes.
            source: Name of the source, for errors.

        Raises:
            ContractError: the content is not a description of a recommender.
        """
        try:
            values = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ContractError(f"{source} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ContractError(f"{source} is {values!r}, expected a recommender")
        return read_mapping(cls, values, path=source)

    @property
    def columns_of_users(self) -> tuple[str, ...]:
        """Return the user feature, and the lists that share its table.

        The result is empty if no feature identifies the user.
        """
        if self.data.user is None:
            return ()
        features = self.features
        lists = (
            name
            for name in features.lists
            if features.list_options_of(name).table == self.data.user
        )
        return (self.data.user, *lists)

    @property
    def user_position(self) -> int | None:
        """Return the index of the user's column on the categorical axis of tensors.

        Returns None if no feature identifies the user.
        """
        return None if self.data.user is None else self.features.categorical.index(self.data.user)

    @property
    def digest(self) -> str:
        """Return the SHA-256 of `dumps`."""
        return hashlib.sha256(self.dumps()).hexdigest()

    @property
    def named_settings(self) -> dict[str, Any]:
        """Return the settings by path, such as `training.learning_rate`, for `with_settings`."""
        return {
            f"{section}.{name}": value
            for section, values in self.settings.items()
            for name, value in values.items()
        }

    def section(self, name: str, kind: type[T]) -> T:
        """Return a section as its dataclass. Absent settings have the defaults of the class.

        Raises:
            ContractError: a setting is unknown, of another type, or refused by the class. The
                message names the setting by its path.
        """
        return read_mapping(kind, self.settings.get(name, {}), path=name)

    def with_settings(self, changes: Mapping[str, Any]) -> "Recommender":
        """Return a copy of the recommender with the settings in `settings`, whose keys are paths.

        Raises:
            ContractError: a path does not name a section and a setting. The reader of the section
                checks the values later.

        >>> features = Features(numeric=("price",), categorical=("item",))
        >>> shop = Recommender(name="shop", features=features)
        >>> shop.with_settings({"training.seed": 7}).settings
        {'training': {'seed': 7}}
        """
        settings = {section: dict(values) for section, values in self.settings.items()}
        for path, value in changes.items():
            section, _, name = path.partition(".")
            if not name:
                raise ContractError(
                    f"setting is {path!r}, expected section.name, such as training.learning_rate"
                )
            settings.setdefault(section, {})[name] = value
        return dataclasses.replace(self, settings=settings)
