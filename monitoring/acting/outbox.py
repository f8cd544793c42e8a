"""Messages on their way to the webhook: kept on disk, bounded, retried, and never waited for by the loop.

In: messages in order. Out: each is delivered at least once, in order, or dropped: when the server refuses it, when it
is older than a day, or when more wait than there is room for (the oldest goes, counted). One sending at a time, on a
thread of its own; the loop looks in at every turn and keeps what became of it.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from uuid import uuid4

from components.notices.webhook import Answer
from monitoring.acting.progress import Documents

logger = logging.getLogger(__name__)

OUTBOX = "outbox"
ROOM = 100
"""Messages that wait at most."""
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 2.0, 600.0
GIVE_UP_SECONDS = 86_400.0
"""A message older than this tells nobody anything."""
ABANDON_SECONDS = 60.0
"""A sending that takes longer (a server answering a byte at a time) is given up; its thread ends with the process."""

Send = Callable[[bytes], Answer]


class Outbox:
    """The messages of one state folder."""

    def __init__(
        self,
        documents: Documents,
        send: Send,
        *,
        room: int = ROOM,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes up what a predecessor could not deliver.

        Args:
            documents: Where the messages are kept.
            send: Sends one message; called on another thread, raises nothing.
            room: Messages that wait at most.
            monotonic: Seconds by a clock that nobody sets, for a sending that hangs.
        """
        self._documents, self._send, self._room, self._monotonic = documents, send, room, monotonic
        self._messages: list[dict[str, Any]] = (documents.read_document(OUTBOX) or {"messages": []})["messages"]
        self._sending: _Sending | None = None
        self._told = ""

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, payload: dict[str, Any], *, now: float) -> None:
        """Keeps a message to be sent."""
        message = {"id": uuid4().hex, "payload": payload, "put_at": now, "tries": 0, "next_at": 0.0}
        messages = [*self._messages, message]
        dropped = max(0, len(messages) - self._room)
        self._keep(messages[dropped:], {"notification_dropped": dropped} if dropped else {})

    def step(self, now: float) -> None:
        """Notes what became of the sending under way, and begins the next that is due."""
        if self._sending is not None:
            answer = self._sending.answer
            if answer is None and self._monotonic() - self._sending.begun_at < ABANDON_SECONDS:
                return
            self._note(self._sending.message_id, answer or Answer("retry", "no whole answer"), now)
            self._sending = None
        if self._messages and self._due(self._messages[0], now):
            first = self._messages[0]
            body = json.dumps(first["payload"]).encode()
            self._sending = _Sending(first["id"], partial(self._send, body), self._monotonic())

    def _due(self, message: dict[str, Any], now: float) -> bool:
        # A clock that was set back must not hold the message for longer than the longest pause.
        return not 0 < float(message["next_at"]) - now <= MAX_PAUSE_SECONDS * 6

    def _note(self, message_id: str, answer: Answer, now: float) -> None:
        if not self._messages or self._messages[0]["id"] != message_id:
            return  # it was dropped meanwhile
        first, *rest = self._messages
        if answer.state == "delivered":
            self._told = ""
            self._keep(rest, {"notification_delivered": 1})
            return
        if answer.reason != self._told:
            logger.warning("a notification was not delivered: %s", answer.reason)
            self._told = answer.reason
        if answer.state == "refused" or now - first["put_at"] > GIVE_UP_SECONDS:
            self._keep(rest, {"notification_dropped": 1})
            return
        pause = min(FIRST_PAUSE_SECONDS * 2.0 ** min(first["tries"], 30), MAX_PAUSE_SECONDS)
        pause = max(pause, answer.retry_after or 0.0)
        self._keep([{**first, "tries": first["tries"] + 1, "next_at": now + pause}, *rest], {})

    def _keep(self, messages: list[dict[str, Any]], counts: dict[str, float]) -> None:
        self._documents.write_documents({OUTBOX: {"messages": messages}}, counts)
        self._messages = messages


class _Sending:
    """One sending on its own thread."""

    def __init__(self, message_id: str, send: Callable[[], Answer], begun_at: float) -> None:
        self.message_id, self.begun_at, self.answer = message_id, begun_at, None
        threading.Thread(target=self._run, args=(send,), name="webhook", daemon=True).start()

    answer: Answer | None

    def _run(self, send: Callable[[], Answer]) -> None:
        try:
            self.answer = send()
        except Exception as error:  # noqa: BLE001 - a thread's error reaches nobody, and the message would wait for ever
            self.answer = Answer("retry", f"failed: {type(error).__name__}")
