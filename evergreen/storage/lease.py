"""Lease in a bucket. At most one process at a time has the lease, and no file lock is needed.

One object contains the name of the holder and the end of the lease. The object is created if it is
absent. The holder renews the lease while it runs. Another holder may take the lease over only after
the end of the lease. Each change of the object is a conditional write, so only one of two competing
processes succeeds. The holder measures time with a monotonic clock, so changes of its wall clock
neither shorten nor extend the lease. A holder that was suspended may resume after the end of its
lease, without noticing the end. The last write of a holder must therefore be conditional too
(`ModelRepository.write_config`).
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import NamedTuple
from uuid import uuid4

from evergreen.runtime.errors import PermanentError, TemporaryError
from evergreen.storage.objects import ABSENT, Changed, Objects

logger = logging.getLogger(__name__)


class _LeaseRecord(NamedTuple):
    """Content of the object that stores the lease."""

    holder: str
    token: str
    expires_at: float
    """End of the lease in seconds since the epoch, by the clock of the holder."""


class Lease:
    """A lease that is stored in the object `name`.

    `holder` is the name that error messages of other processes show. `seconds` is the time between
    acquiring or renewing the lease and its end. `seconds` must exceed the difference between the
    clocks of two machines. `monotonic` is a clock that nobody can set back.
    """

    def __init__(
        self,
        objects: Objects,
        name: str,
        *,
        holder: str,
        seconds: float,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._objects, self._name, self._holder = objects, name, holder
        self._seconds, self._clock, self._monotonic = seconds, clock, monotonic
        self._token = uuid4().hex
        self._generation: int | None = None
        self._offset = 0.0
        self._ends = 0.0
        self._turn = threading.Lock()

    def acquire(self) -> None:
        """Acquire the lease.

        Raises:
            TemporaryError: another holder has the lease. The error names the holder and the end of
                the lease.
        """
        found = self._objects.read(self._name)
        if found is not None:
            record = self._parse(found.content)
            if self._clock() < record.expires_at:
                raise TemporaryError(self._holder_message(record))
            logger.warning("the lease of %s ended, taking it over", record.holder)
        self._offset = self._clock() - self._monotonic()
        try:
            self._write(ABSENT if found is None else found.generation)
        except Changed as error:
            winner = self._objects.read(self._name)
            holder = (
                self._holder_message(self._parse(winner.content))
                if winner
                else "another process was faster"
            )
            raise TemporaryError(holder) from error

    def renew(self) -> None:
        """Extend the lease to `seconds` from now.

        Raises:
            TemporaryError: another holder took the lease over, or the storage does not answer.
        """
        with self._turn:
            assert self._generation is not None, "the lease is not held"
            try:
                self._write(self._generation)
            except Changed as error:
                self._ends = self._monotonic()
                raise TemporaryError(self._lost_message()) from error

    def check(self) -> None:
        """Raise an error if this holder no longer has the lease.

        Raises:
            TemporaryError: the lease ended, or another holder took it over.
        """
        with self._turn:
            if self._monotonic() >= self._ends:
                raise TemporaryError(self._lost_message())
            found = self._objects.read(self._name)
            if found is None or self._parse(found.content).token != self._token:
                self._ends = self._monotonic()
                raise TemporaryError(self._lost_message())

    def release(self) -> None:
        """Release the lease. A lease that another holder took over is not changed."""
        with self._turn:
            try:
                self._objects.delete(self._name, if_generation=self._generation)
            except (TemporaryError, PermanentError) as error:
                logger.warning(
                    "the lease %s/%s was not released: %s", self._objects.uri, self._name, error
                )
            self._generation, self._ends = None, 0.0

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Renew an acquired lease from a separate thread, and release it at the end."""
        stop = threading.Event()
        renewing = threading.Thread(
            target=self._keep_renewing, args=(stop,), name="lease", daemon=True
        )
        renewing.start()
        try:
            yield
        finally:
            stop.set()
            renewing.join()
            self.release()

    def _keep_renewing(self, stop: threading.Event) -> None:
        while not stop.wait(self._seconds / 3):
            try:
                self.renew()
            except (TemporaryError, PermanentError) as error:
                logger.error("the lease was not renewed: %s", error)

    def _write(self, generation: int) -> None:
        now = self._monotonic()
        ends = now + self._seconds
        expires_at = ends + self._offset
        times = {"expires_at": expires_at, "expires": _text(expires_at)}
        document = {"holder": self._holder, "token": self._token, **times}
        content = (json.dumps(document) + "\n").encode()
        self._generation = self._objects.write(self._name, content, if_generation=generation)
        self._ends = ends

    def _parse(self, content: bytes) -> _LeaseRecord:
        try:
            document = json.loads(content)
            return _LeaseRecord(
                str(document["holder"]), str(document["token"]), float(document["expires_at"])
            )
        except (ValueError, TypeError, KeyError) as error:
            raise PermanentError(
                f"{self._objects.uri}/{self._name} is not a lease ({error!r}); remove it if no "
                "deployment is at work"
            ) from error

    def _holder_message(self, record: _LeaseRecord) -> str:
        return f"{self._objects.uri} is held by {record.holder} until {_text(record.expires_at)}"

    def _lost_message(self) -> str:
        return (
            f"{self._holder} no longer holds {self._objects.uri}: its lease ended, or another "
            "process took the lease"
        )


def _text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")
