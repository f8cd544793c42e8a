"""Profiles of the windows in a model's lineage. The next run compares its rows with the profiles.

The model's folder contains two profiles (`manifests.Model.WINDOWS`): the newest window, and all
older windows merged into one. Each profile has at most 2 MB.
"""

from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path

from evergreen.config.features import Features
from evergreen.runtime.errors import ContractError
from evergreen.statistics.column_profile import TableProfile
from evergreen.statistics.profile_files import read_profiles, write_profiles

_KIND, _FORMAT_VERSION = "TrainingWindows", 1


@dataclass(frozen=True)
class KeptWindows:
    """Windows in the order of training, the newest last. Older windows may be merged into one."""

    windows: tuple[TableProfile, ...]

    @cached_property
    def merged(self) -> TableProfile:
        """All windows of the lineage, merged into one."""
        return reduce(TableProfile.__add__, self.windows)

    @property
    def newest(self) -> TableProfile:
        """Window of rows that the model itself was trained on."""
        return self.windows[-1]

    def followed_by(self, window: TableProfile) -> "KeptWindows":
        """Return windows of which `window` is the newest. All earlier windows are merged into one.

        The new window replaces the newest one if both have the same rows.
        """
        before = self.windows
        if before and window.digest and before[-1].digest == window.digest:
            before = before[:-1]
        return KeptWindows((KeptWindows(before).merged, window) if before else (window,))

    def expect_kinds(self, features: Features) -> None:
        """Refuse features that cannot be compared.

        Raises:
            ContractError: A feature is numeric now and was categorical in these windows, or the
                other way round.
        """
        for name, column in self.merged.columns.items():
            if name in (
                features.numeric
                if column.values is not None
                else features.categorical + features.lists
            ):
                now, before = (
                    ("numeric", "categorical")
                    if column.values is not None
                    else ("categorical", "numeric")
                )
                raise ContractError(
                    f"feature {name} is {now}, was {before} in the champion's rows: give it a new "
                    "name"
                )

    def write(self, path: Path) -> None:
        """Write the windows to a file, completely or not at all."""
        write_profiles(path, self.windows, kind=_KIND, version=_FORMAT_VERSION)


def read_windows(path: Path) -> KeptWindows:
    """Return the windows in a file.

    Raises:
        ContractError: The file is absent, corrupt, or of another kind, version or bucket edges.
    """
    return KeptWindows(read_profiles(path, kind=_KIND, version=_FORMAT_VERSION)[0])
