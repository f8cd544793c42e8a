"""Traffic as a client of ours sends it, kept with what each answer says of itself."""

from __future__ import annotations

import asyncio
import threading

from components.runtime.errors import PermanentError, TemporaryError
from inference_client.scoring import ClientSettings, ScoringClient
from tests.support.processes import wait_for


class Traffic:
    """A retrying client that scores the same rows every few milliseconds; keeps answers with the versions they name."""

    def __init__(self, url, rows):
        self.answers, self.failures = [], []
        self._url, self._rows, self._stop = url, rows, threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    async def _run(self):
        async with ScoringClient(self._url, ClientSettings(max_attempts=10)) as client:
            while not self._stop.is_set():
                try:
                    self.answers.append(await client.score(*self._rows))
                except (TemporaryError, PermanentError) as error:
                    self.failures.append(error)
                await asyncio.sleep(0.005)

    def more(self, count=5):
        """Returns after `count` more answers."""
        wanted = len(self.answers) + count
        wait_for(lambda: len(self.answers) >= wanted)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
