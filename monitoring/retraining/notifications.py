"""Turn journal events into incidents and messages, and send them to the webhook.

An incident is a drift, an unreachable log, dead letters, rows that cannot be archived, or a bad
release. Within an incident, each kind of event is sent once. While an incident is open, its message
is repeated every `remind_seconds`. Another message reports the end of the incident.

Messages are stored on disk in order, and are delivered at least once or dropped. A message is
dropped if the server refuses it, or if it is older than a day. If too many messages wait, the
oldest message is dropped. One message is sent at a time on a separate thread, so that the loop
never waits for the server. `evergreen.notifications` formats and sends messages.
"""

import dataclasses
import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from evergreen.notifications.webhook import Answer, compose
from evergreen.runtime.errors import ContractError, expect
from monitoring.journal import Event
from monitoring.state.database import Database

logger = logging.getLogger(__name__)

INCIDENTS, _OUTBOX = "incidents", "outbox"
"""Names of two documents in the monitor's state."""
DRIFT = "drift"
LOG = "log"
_DEAD_LETTER = "dead_letter"
_RELEASE = "release"
"""Names of incidents."""
_MAX_WAITING = 100
"""Maximum number of waiting messages."""
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 2.0, 600.0
_GIVE_UP_SECONDS = 86_400.0
"""Age at which a message is dropped, because it is outdated."""


@dataclass(frozen=True, kw_only=True)
class NotificationSettings:
    """Destination and frequency of messages for people."""

    webhook_file: str = ""
    """File with the address of a webhook that accepts Slack's JSON. Empty means no notifications.
    The address is a secret, so it is not a setting."""
    remind_seconds: float = 6 * 3600.0
    """Seconds between two messages about an open incident."""
    status_url: str = ""
    """Address of the status page for people, linked in messages."""

    def __post_init__(self) -> None:
        expect(self, "above 0", lambda value: value > 0, "remind_seconds")
        if "://" in self.webhook_file:
            raise ContractError(
                "webhook_file is an address, expected the path of a file that contains the address"
            )


class _Rule(NamedTuple):
    incident: str
    title: str
    done: str = ""
    is_of_run: bool = False
    """Whether the event is sent once per run without opening an incident. A run can end after its
    drift has ended."""


_RULES = {
    "decision": _Rule(DRIFT, "Drift confirmed"),
    "held": _Rule(DRIFT, "Drift continues, retraining is held", "nothing yet"),
    "requested": _Rule(DRIFT, "Retraining requested", "a run was started", is_of_run=True),
    "overdue": _Rule(DRIFT, "A retraining run takes long", is_of_run=True),
    "released": _Rule(DRIFT, "A new version was released", "released", is_of_run=True),
    "canary": _Rule(
        DRIFT, "A new version runs beside the live one", "its canary decides", is_of_run=True
    ),
    "evaluated": _Rule(
        DRIFT, "A new model was evaluated", "stored; a person may promote it", is_of_run=True
    ),
    "refused": _Rule(
        DRIFT, "The new model was refused", "the live version stays live", is_of_run=True
    ),
    "failed": _Rule(
        DRIFT, "A retraining run failed", "it is retried after a pause", is_of_run=True
    ),
    "bad_release": _Rule(
        _RELEASE, "A new version is bad", "the release controller rolls it back", is_of_run=True
    ),
    "rolled_back": _Rule(
        _RELEASE,
        "A new version was rolled back",
        "the previous version is live again",
        is_of_run=True,
    ),
    "log_down": _Rule(LOG, "The record log cannot be reached"),
    "dead_letter": _Rule(
        _DEAD_LETTER, "Messages could not be used", "stored as dead letters, with their bytes"
    ),
    "set_apart": _Rule(
        "set_apart",
        "Rows could not be archived",
        "stored in the state folder, retried at the next start",
    ),
}
"""Rule for each kind of event: the incident to which the event belongs, and the texts of the
message. For the end of a run, the run's outcome determines the rule."""
_ENDS = {"recovered": (DRIFT, "Recovered"), "log_up": (LOG, "The record log can be reached again")}


@dataclass(frozen=True, kw_only=True)
class OpenIncident:
    """One open incident, stored as JSON."""

    since: float
    last_at: float
    """Time of the newest event of the incident."""
    sent_at: float
    amount: float = 0.0
    """Number of dead letters so far."""
    text: str = ""
    sent: tuple[str, ...] = ()
    """Kinds of events that were sent. The kind of a run's event includes the name of the run."""
    numbers: dict[str, Any] = field(default_factory=dict)


class Notifier:
    """Turns events into incidents and messages."""

    def __init__(
        self,
        documents: Database,
        outbox: "Outbox | None",
        settings: NotificationSettings,
        *,
        recommender: str,
        clock: Callable[[], float],
    ) -> None:
        """Continue the incidents stored in `documents`.

        Incidents are stored even without an outbox, because the page shows them. Messages begin
        with the recommender's name, because monitors of several recommenders may send to one
        channel.
        """
        self._recommender = recommender
        self._documents = documents
        self.outbox = outbox
        self._settings = settings
        self._clock = clock
        saved = documents.read_document(INCIDENTS) or {}
        self.open = {
            name: OpenIncident(**{**values, "sent": tuple(values["sent"])})
            for name, values in saved.items()
        }
        """The open incidents by name: `drift`, `log`, `dead_letter`, `release` or `set_apart`."""

    def on_event(self, event: Event) -> None:
        """Handle an event of the journal."""
        kind = str(event.details["outcome"]) if event.kind == "run_ended" else event.kind
        if kind in _ENDS:
            self._close(*_ENDS[kind], event)
        elif kind in _RULES:
            self._update(kind, _RULES[kind], event)

    def step(self, now: float) -> None:
        """Send due reminders, and advance the outbox."""
        for name, incident in list(self.open.items()):
            # If the clock was set back, an early reminder is better than no reminder.
            if abs(now - incident.sent_at) < self._settings.remind_seconds:
                continue
            if name == _DEAD_LETTER and incident.last_at <= incident.sent_at:
                self.close_silently(name)
                continue
            self._send("Still: " + incident.text, incident, numbers=incident.numbers, now=now)
            self._store({**self.open, name: dataclasses.replace(incident, sent_at=now)})
        if self.outbox is not None:
            self.outbox.step(now)

    def close_silently(self, name: str) -> None:
        """Close an incident without a message."""
        if name in self.open:
            self._store({key: each for key, each in self.open.items() if key != name})

    def _update(self, kind: str, rule: _Rule, event: Event) -> None:
        now = self._clock()
        is_open = rule.incident in self.open
        known = self.open.get(rule.incident) or OpenIncident(since=now, last_at=now, sent_at=now)
        key = f"{kind} {event.details.get('request_id')}" if rule.is_of_run else kind
        numbers = dict(event.details)
        incident = dataclasses.replace(
            known,
            last_at=now,
            amount=known.amount + float(numbers.get("messages") or 0),
            text=event.text,
            sent=(*known.sent, key)[-50:] if key not in known.sent else known.sent,
            numbers=numbers,
        )
        if key not in known.sent:
            self._send(
                f"{rule.title}: {event.text}", incident, numbers=numbers, now=now, done=rule.done
            )
            incident = dataclasses.replace(incident, sent_at=now)
        if is_open or not rule.is_of_run:
            self._store({**self.open, rule.incident: incident})

    def _close(self, name: str, title: str, event: Event) -> None:
        incident = self.open.get(name)
        if incident is not None:
            self._send(f"{title}: {event.text}", incident, numbers=event.details, now=self._clock())
            self.close_silently(name)

    def _send(
        self,
        text: str,
        incident: OpenIncident,
        *,
        numbers: Mapping[str, Any],
        now: float,
        done: str = "",
    ) -> None:
        if self.outbox is not None:
            amounts = {**numbers, "messages": incident.amount} if incident.amount else numbers
            text, link = f"{self._recommender}: {text}", self._settings.status_url
            payload = compose(text, numbers=amounts, since=incident.since, done=done, link=link)
            self.outbox.put(payload, now=now)

    def _store(self, incidents: dict[str, OpenIncident]) -> None:
        documents = {
            INCIDENTS: {name: dataclasses.asdict(each) for name, each in incidents.items()}
        }
        self._documents.write_documents(documents)
        self.open = incidents


@dataclass(frozen=True, kw_only=True)
class WaitingMessage:
    """A waiting message, stored as JSON."""

    payload: dict[str, Any]
    put_at: float
    tries: int = 0
    next_at: float = 0.0


class Outbox:
    """Waiting messages of one state folder."""

    def __init__(self, documents: Database, send: Callable[[bytes], Answer]) -> None:
        """Continue with the messages that a predecessor could not deliver.

        `send` is called on another thread, and must return without raising.
        """
        self._documents = documents
        self._send = send
        saved = documents.read_document(_OUTBOX) or {"messages": []}
        self._messages = [WaitingMessage(**each) for each in saved["messages"]]
        self._attempt: _Attempt | None = None
        self._logged_reason = ""

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, payload: dict[str, Any], *, now: float) -> None:
        """Store a message to be sent."""
        messages = [*self._messages, WaitingMessage(payload=payload, put_at=now)]
        dropped = max(0, len(messages) - _MAX_WAITING)
        self._store(messages[dropped:], {"notification_dropped": dropped} if dropped else {})

    def step(self, now: float) -> None:
        """Handle the result of the last attempt, and start the next attempt if it is due."""
        if self._attempt is not None:
            if (answer := self._attempt.answer) is None:
                return
            # The message may have been dropped during the attempt.
            if self._messages and self._messages[0] is self._attempt.message:
                self._handle_answer(answer, now)
            self._attempt = None
        # After a clock was set back, wait no longer than the longest pause.
        if self._messages and not 0 < self._messages[0].next_at - now <= _MAX_PAUSE_SECONDS * 6:
            self._attempt = _Attempt(self._messages[0], self._send)

    def _handle_answer(self, answer: Answer, now: float) -> None:
        """Drop the first message, or schedule another attempt."""
        first, *rest = self._messages
        if answer.state == "delivered":
            self._logged_reason = ""
            self._store(rest, {"notification_delivered": 1})
            return
        if answer.reason != self._logged_reason:
            logger.warning("a notification was not delivered: %s", answer.reason)
            self._logged_reason = answer.reason
        if answer.state == "refused" or now - first.put_at > _GIVE_UP_SECONDS:
            self._store(rest, {"notification_dropped": 1})
            return
        pause = min(_FIRST_PAUSE_SECONDS * 2.0 ** min(first.tries, 30), _MAX_PAUSE_SECONDS)
        pause = max(pause, answer.retry_after or 0.0)
        self._store(
            [dataclasses.replace(first, tries=first.tries + 1, next_at=now + pause), *rest], {}
        )

    def _store(self, messages: list[WaitingMessage], counts: dict[str, float]) -> None:
        document = {"messages": [dataclasses.asdict(each) for each in messages]}
        self._documents.write_documents({_OUTBOX: document}, counts)
        self._messages = messages


class _Attempt:
    """One attempt to send a message, on a separate thread."""

    def __init__(self, message: WaitingMessage, send: Callable[[bytes], Answer]) -> None:
        self.message = message
        self.answer: Answer | None = None
        threading.Thread(
            target=self._send_message, args=(send,), name="webhook", daemon=True
        ).start()

    def _send_message(self, send: Callable[[bytes], Answer]) -> None:
        try:
            self.answer = send(json.dumps(self.message.payload).encode())
        except Exception as error:  # noqa: BLE001 - an error on this thread reaches nobody, and the message would wait forever
            self.answer = Answer("retry", f"failed: {type(error).__name__}")
