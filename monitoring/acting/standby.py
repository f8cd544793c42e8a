"""From start to leading: a replica stands by until the state folder and the lease are its own.

In: settings, a stop. Out: the store, the ledger and the claim, for as long as the body runs. A standby opens no log and
no store: it takes no messages and decides nothing. The state folder's lock comes first: who holds it knows that its
predecessor over this folder is dead, and takes that one's lease without waiting for its end.

Replicas may share one state folder, where its file system's locks reach all of them, or have one each. In the second
case what a leader took in and did not archive stays with its folder until that replica leads again; what was asked of
the pipeline passes to the successor at once.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

from components.runtime.errors import PermanentError, TemporaryError
from components.storage.locations import open_objects
from monitoring.acting.leadership import NO_LEASE, Leadership, LeadershipSettings, NotLeading, replica_name
from monitoring.acting.ledger import Ledger, last_term
from monitoring.memory.store import Store

logger = logging.getLogger(__name__)

STORE_FILE = "monitor.db"
LEASES = "leases"
_REMEDY = "set `lease` to a folder or bucket that the monitor may write, or to `none` for a single replica"
_NO_RIGHT = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)


class Claim(NamedTuple):
    """What a leader holds."""

    store: Store
    ledger: Ledger | None
    """None without a lease."""
    leadership: Leadership | None

    def guard(self) -> None:
        """Returns if this replica may act: asks the lease's storage.

        Raises:
            NotLeading: it may not any more.
            TemporaryError: the storage does not answer.
        """
        if self.leadership is not None:
            self.leadership.check()

    def expect_leading(self) -> None:
        """Returns if the lease has not ended by this process's clock; costs nothing, for every turn of the loop.

        Raises:
            NotLeading: it has ended.
        """
        if self.leadership is not None and not self.leadership.leads:
            raise NotLeading("the lease ended before it could be renewed")


def open_leadership(settings: LeadershipSettings, *, state: Path, model_store: Path) -> Leadership | None:
    """This replica's claim; None where the settings say that there is no other replica.

    Raises:
        ContractError: `lease` names no folder or bucket.
    """
    if settings.lease == NO_LEASE:
        return None
    objects = open_objects(settings.lease or str(_default_folder(state, model_store).absolute()))
    return Leadership(objects, replica=replica_name(state), seconds=settings.lease_seconds)


def _default_folder(state: Path, model_store: Path) -> Path:
    """A monitor only reads the model store, and may have no right to write it."""
    folder = model_store / LEASES
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        if error.errno not in _NO_RIGHT:
            raise PermanentError(f"the lease cannot be taken: {error}; {_REMEDY}") from error
        logger.warning("%s: only replicas that share the state folder agree on who works; %s", error, _REMEDY)
        return state / LEASES


@contextmanager
def leading(
    leadership: Leadership | None,
    *,
    state: Path,
    stop: threading.Event,
    pause_seconds: float,
    tell: Callable[[str], None],
    own: Callable[[], None] = lambda: None,
) -> Iterator[Claim | None]:
    """Yields the claim once this replica leads; None where `stop` came first.

    Args:
        leadership: From `open_leadership`; None = whoever holds the state folder works.
        state: The monitor's state folder.
        stop: Ends the waiting.
        pause_seconds: Between two tries.
        tell: Given the reason at each try that failed.
        own: Called at each try at which the state folder is this replica's and no other's, whoever leads.

    Raises:
        TemporaryError: without a lease, another monitor holds the state folder.
        PermanentError: the lease's storage refuses.
    """
    claim = None
    while claim is None:
        try:
            claim = _claim(leadership, state, own)
        except TemporaryError as error:
            if leadership is None:
                raise
            tell(str(error))
            if stop.wait(pause_seconds):
                yield None
                return
    try:
        if leadership is None:
            yield claim
        else:
            logger.info("this replica leads, term %d", leadership.term)
            with leadership.kept():
                yield claim
    finally:
        claim.store.close()


def _claim(leadership: Leadership | None, state: Path, own: Callable[[], None]) -> Claim:
    store = Store(state / STORE_FILE)
    try:
        own()
        if leadership is None:
            return Claim(store, None, None)
        leadership.take(after=last_term(leadership.objects))
        return Claim(store, Ledger(store, leadership.objects, term=leadership.term), leadership)
    except TemporaryError:
        store.close()
        raise
    except PermanentError as error:
        store.close()
        raise PermanentError(f"the lease cannot be taken: {error}; {_REMEDY}") from error
