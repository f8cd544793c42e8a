"""Limit the model versions that predictions may name.

Versions in the promotion journal are always accepted. At most `MAX_OTHERS` other versions are
accepted per day. The limit exists because every version has its own windows, drift buckets and
state. Without a limit, a client that invents version numbers could slow the monitor down by
minutes.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any

from evergreen.runtime.errors import ContractError

MAX_OTHERS = 64
"""Maximum number of accepted versions that the promotion journal does not name. Versions outside
the journal exist, for example, if another program serves a model."""
_OTHERS_SECONDS = 86_400.0
"""If a version outside the journal has no prediction for this number of seconds, it loses its
slot."""


class AdmittedVersions:
    """Accepted model versions."""

    def __init__(
        self,
        released: Callable[[], Collection[int]],
        clock: Callable[[], float],
        *,
        state: dict[str, Any] | None,
    ) -> None:
        """Continue from the predecessor's saved state, or start empty.

        Args:
            released: Returns the versions that the promotion journal names.
            clock: Returns seconds since the epoch.
            state: Saved state that `state_dict()` returned in an earlier process, or None.
        """
        self._released, self._clock = released, clock
        others = (state or {}).get("others", {})
        self._others: dict[int, float] = {int(version): float(at) for version, at in others.items()}
        self._known: frozenset[int] | None = None
        self.now: set[int] = set(self._others)
        """Accepted versions. Predictions of other versions are checked."""

    def begin_batch(self) -> None:
        """Read the promotion journal again when the next unknown version occurs.

        A release is in the journal before it serves.
        """
        self._known = None

    def expect(self, version: int) -> None:
        """Accept a version.

        Raises:
            ContractError: The promotion journal does not name the version, and all slots for
                unnamed versions are taken.
        """
        if version in self.now:
            return
        if self._known is None:
            self._known = frozenset(self._released())
        if version not in self._known:
            if len(self._others) >= MAX_OTHERS:
                self._drop_old()
            if len(self._others) >= MAX_OTHERS:
                raise ContractError(
                    f"model version {version} is unknown to the model registry, and so are "
                    f"{MAX_OTHERS} others that were "
                    "logged within a day; expected a released version"
                )
            self._others[version] = self._clock()
        self.now.add(version)

    def seen(self, versions: Iterable[int]) -> None:
        """Record that predictions of these accepted versions arrived now."""
        now = self._clock()
        for version in versions:
            if version in self._others:
                self._others[version] = now

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a successor process as a JSON object."""
        return {"others": {str(version): at for version, at in self._others.items()}}

    def _drop_old(self) -> None:
        now, known = self._clock(), self._known or ()
        # Use the absolute difference, because the time of the last prediction can be in the future.
        self._others = {
            version: at
            for version, at in self._others.items()
            if version not in known and abs(now - at) < _OTHERS_SECONDS
        }
        self.now = {version for version in self.now if version in self._others or version in known}
