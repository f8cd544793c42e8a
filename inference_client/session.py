"""One replay as a process: wires its parts, obeys standard input, writes a line per second and the summary.

Ends with its parent: end of standard input means stop. What is sent and when is `replay`'s.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from components.logs.locations import open_publisher
from components.runtime.durable import write_whole
from components.runtime.errors import PermanentError, TemporaryError
from inference_client.client import ClientSettings
from inference_client.publisher import RecordPublisher
from inference_client.replay import Replay, ReplaySettings
from inference_client.routing import PlannedClient, open_scorer
from inference_client.traffic import Traffic

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SessionSettings:
    """Where a replay reads and writes."""

    server: str
    log_url: str
    seed: int
    stats_path: Path
    """One JSON line per second."""
    summary_path: Path
    """Written when the replay ends, whichever way."""
    run: str
    """Names the replay in request ids; must be new to the log."""
    plan_uri: str | None = None
    """Model repository whose traffic plan is followed; None = everyone asks the one model."""
    stdin: int = 0
    """File descriptor of the commands: drift, rate N, stop; its end means stop."""


def run_session(
    session: SessionSettings, replay: ReplaySettings, client: ClientSettings, make_traffic: Callable[[], Traffic]
) -> dict[str, Any]:
    """Replays until told to stop; the summary.

    Raises:
        ContractError: the traffic or the log cannot be used as asked.
        PermanentError: too many requests failed in a row, or the log stayed unavailable; the summary is written.
    """
    return asyncio.run(_Session(session, replay, client, make_traffic()).run())


class _Session:
    def __init__(
        self, session: SessionSettings, replay: ReplaySettings, client: ClientSettings, traffic: Traffic
    ) -> None:
        self._session, self._settings, self._client_settings, self._traffic = session, replay, client, traffic

    async def run(self) -> dict[str, Any]:
        log = open_publisher(self._session.log_url)
        random = np.random.default_rng([self._session.seed, 8])
        publisher = RecordPublisher(log, source=self._session.run)
        started = time.monotonic()
        try:
            server, plan_uri = self._session.server, self._session.plan_uri
            async with open_scorer(server, self._client_settings, plan_uri=plan_uri) as scorer:
                replay = Replay(scorer, self._traffic, publisher, self._settings, random, run=self._session.run)
                self._listen(replay)
                error = await self._run(replay, publisher)
        finally:
            log.close()
        summary = self._summary(replay, publisher, error, time.monotonic() - started)
        if isinstance(scorer, PlannedClient):
            summary["plan"] = scorer.summary()
        write_whole(self._session.summary_path, json.dumps(summary, indent=2, allow_nan=False) + "\n")
        if error is not None:
            raise PermanentError(error)
        return summary

    async def _run(self, replay: Replay, publisher: RecordPublisher) -> str | None:
        """Sends and publishes to the end; why it failed, or None."""
        self._session.stats_path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._session.stats_path, "w") as stats:
            publishing = asyncio.create_task(publisher.run())
            lines = asyncio.create_task(self._write_lines(replay, stats))
            sending = asyncio.create_task(replay.send())
            await asyncio.wait({sending, publishing}, return_when=asyncio.FIRST_COMPLETED)
            # The publisher runs until it is drained; ended now means that the log failed.
            replay.stop()
            await sending
            error = None
            if replay.gave_up:
                error = (
                    f"server {self._session.server}: {self._settings.max_consecutive_failures} requests failed in a "
                    f"row, the last with: {replay.last_error}"
                )
            try:
                if publishing.done():
                    await publishing
                await publisher.drain()
                await publishing
            except (TemporaryError, PermanentError) as log_error:
                error = f"records could not be published: {log_error}"
            lines.cancel()
            _write_line(replay, stats)
        return error

    def _listen(self, replay: Replay) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, replay.stop)
        arguments = (self._session.stdin, loop, replay)
        threading.Thread(target=_read_commands, args=arguments, name="commands", daemon=True).start()

    async def _write_lines(self, replay: Replay, stats: IO[str]) -> None:
        while True:
            await asyncio.sleep(1.0)
            _write_line(replay, stats)

    def _summary(self, replay: Replay, publisher: RecordPublisher, error: str | None, seconds: float) -> dict[str, Any]:
        return {
            **replay.statistics.summary(),
            "outcomes": publisher.published_outcomes,
            "published_rows": publisher.published_rows,
            "dropped_rows": publisher.dropped_rows,
            "exhausted": replay.exhausted,
            "drift": self._traffic.drift_note,
            "behind_seconds": round(replay.forgiven_seconds, 3),
            "seconds": round(seconds, 3),
            "cpu_seconds": round(time.process_time(), 3),
            "run": self._session.run,
            "server": self._session.server,
            "error": error,
        }


def _write_line(replay: Replay, stats: IO[str]) -> None:
    line = replay.statistics.take_second(time=time.time(), behind_seconds=replay.behind_seconds)
    stats.write(json.dumps({**line, "exhausted": replay.exhausted}, allow_nan=False) + "\n")
    stats.flush()


def _read_commands(stdin: int, loop: asyncio.AbstractEventLoop, replay: Replay) -> None:
    """Passes lines on to the loop, from a thread."""
    # os.read and not sys.stdin: a daemon thread inside a buffered reader can abort the interpreter's exit.
    unread = b""
    try:
        while chunk := os.read(stdin, 4096):
            *lines, unread = (unread + chunk).split(b"\n")
            for line in lines:
                loop.call_soon_threadsafe(replay.command, line.decode(errors="replace"))
    except OSError as error:
        logger.error("standard input cannot be read, stopping: %s", error)
    try:
        loop.call_soon_threadsafe(replay.stop)
    except RuntimeError:
        logger.debug("standard input ended after the replay")
