"""Which model versions predictions may name: those of the model store, and a few others a day.

In: the version of a prediction that is decoded. Out: whether it is taken in. Each version has windows, buckets of drift
and lines in the state of its own, so forged versions without end would keep the monitor at work for minutes. A version
that the promotion journal names is always taken in, whatever others are forged.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any

from evergreen.runtime.errors import ContractError

MAX_OTHERS = 64
"""Versions at a time that the promotion journal does not name, such as those of a model served by somebody else."""
OTHERS_SECONDS = 86_400.0
"""After this time without a prediction, another version may take the place of one."""


class AdmittedVersions:
    """The versions that are taken in now."""

    def __init__(
        self, released: Callable[[], Collection[int]], clock: Callable[[], float], *, memory: dict[str, Any] | None
    ) -> None:
        """Continue from what `memory()` returned; None begins anew.

        Args:
            released: Returns the versions that the promotion journal names.
            clock: Returns seconds since the epoch.
            memory: The predecessor's.
        """
        self._released, self._clock = released, clock
        others = (memory or {}).get("others", {})
        self._others: dict[int, float] = {int(version): float(at) for version, at in others.items()}
        self._known: frozenset[int] | None = None
        self.now: set[int] = set(self._others)
        """Versions that need no further check."""

    def begin_batch(self) -> None:
        """Read the journal anew for the next version that is unknown: a release is named there before it is served."""
        self._known = None

    def expect(self, version: int) -> None:
        """Take in a version.

        Raises:
            ContractError: The journal does not name it, and as many others were seen within a day as may be.
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
                    f"model version {version} is unknown to the model store, and so are {MAX_OTHERS} others that were "
                    "logged within a day; expected a released version"
                )
            self._others[version] = self._clock()
        self.now.add(version)

    def seen(self, versions: Iterable[int]) -> None:
        """Note that predictions of these versions, which were taken in, came now."""
        now = self._clock()
        for version in versions:
            if version in self._others:
                self._others[version] = now

    def memory(self) -> dict[str, Any]:
        """Return what a successor needs, a JSON object."""
        return {"others": {str(version): at for version, at in self._others.items()}}

    def _drop_old(self) -> None:
        now, known = self._clock(), self._known or ()
        # Also those of a clock that was ahead.
        self._others = {
            version: at
            for version, at in self._others.items()
            if version not in known and abs(now - at) < OTHERS_SECONDS
        }
        self.now = {version for version in self.now if version in self._others or version in known}
