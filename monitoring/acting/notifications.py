"""What people are told of, and when they are spared: events in, messages out.

Listens to the journal. Events belong to incidents: a drift, a dead log, unusable messages. Within an incident each
kind of event is told once; while it stays open it is recalled every `remind_seconds`; when it ends that is told too.
Delivering is `monitoring.acting.outbox`'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from components.notices.message import compose
from components.runtime.errors import ContractError
from monitoring.acting.outbox import Outbox
from monitoring.acting.progress import Documents

INCIDENTS = "incidents"
DRIFT, LOG, DEAD_LETTER = "drift", "log", "dead_letter"


@dataclass(frozen=True, kw_only=True)
class NotificationSettings:
    """Whom to tell."""

    webhook_file: str = ""
    """File that holds the address of a webhook taking Slack's JSON; empty = nobody is told. The address is a secret,
    so it is no setting itself."""
    remind_seconds: float = 6 * 3600.0
    """How often an open incident is told again."""
    status_url: str = ""
    """Where people reach the status page; becomes the messages' link."""

    def __post_init__(self) -> None:
        """Refuses reminders without a pause, and an address where its file should be named."""
        if not self.remind_seconds > 0:
            raise ContractError(f"remind_seconds is {self.remind_seconds}, expected above 0")
        if "://" in self.webhook_file:
            raise ContractError("webhook_file is an address, expected the name of a file that holds it")


class _Rule(NamedTuple):
    incident: str
    title: str
    done: str = ""


_RULES = {
    "decision": _Rule(DRIFT, "Drift confirmed"),
    "held": _Rule(DRIFT, "Drift goes on, retraining is held", "nothing yet"),
    "requested": _Rule(DRIFT, "Retraining requested", "a run was started"),
    "overdue": _Rule(DRIFT, "A retraining run takes long"),
    "released": _Rule(DRIFT, "A new version was released", "released"),
    "refused": _Rule(DRIFT, "The new model was refused", "what was live stays live"),
    "failed": _Rule(DRIFT, "A retraining run failed", "it is tried again after a rest"),
    "rollback_decided": _Rule(DRIFT, "Drift confirmed: rolling back", "a rollback was started"),
    "rollback_done": _Rule(DRIFT, "Rolled back", "the previous version is live again"),
    "rollback_failed": _Rule(DRIFT, "A rollback failed"),
    "shadow_decided": _Rule(DRIFT, "Drift confirmed: starting a shadow", "a shadow was started"),
    "shadow_done": _Rule(DRIFT, "A shadow runs"),
    "shadow_failed": _Rule(DRIFT, "A shadow could not be started"),
    "log_down": _Rule(LOG, "The record log is not reached"),
    "dead_letter": _Rule(DEAD_LETTER, "Messages could not be used", "dead letters, kept with their bytes"),
}
_ENDS = {"recovered": (DRIFT, "Recovered"), "log_up": (LOG, "The record log is reached again")}
_AFTERMATH = (
    "requested",
    "overdue",
    "released",
    "refused",
    "failed",
    "rollback_done",
    "rollback_failed",
    "shadow_done",
    "shadow_failed",
)
"""What a drift brings with it: a run may end when its drift is over, and then it is no drift that could recover."""
_RUN_EVENTS = ("requested", "overdue", "released", "refused", "failed")
"""Told once for each run, where the others are told once for an incident."""


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One open incident; kept as JSON."""

    since: float
    last_at: float
    """When something of it happened last."""
    sent_at: float
    amount: float = 0.0
    """Dead letters so far."""
    text: str = ""
    told: tuple[str, ...] = ()
    numbers: dict[str, Any] = field(default_factory=dict)


class Notifier:
    """The open incidents, and who is told of them."""

    def __init__(
        self, documents: Documents, outbox: Outbox | None, settings: NotificationSettings, clock: Callable[[], float]
    ) -> None:
        """Takes up the incidents that were open.

        Args:
            documents: Where the incidents are kept.
            outbox: None = nobody is told; incidents are kept all the same, for the status page.
            settings: See `NotificationSettings`.
            clock: Seconds since the epoch.
        """
        self._documents, self.outbox, self._settings, self._clock = documents, outbox, settings, clock
        kept = documents.read_document(INCIDENTS) or {}
        self.open = {name: Incident(**{**values, "told": tuple(values["told"])}) for name, values in kept.items()}
        """The open incidents by name: `drift`, `log`, `dead_letter`."""

    def hear(self, event: dict[str, Any]) -> None:
        """Takes an event of the journal."""
        kind = str(event["outcome"]) if event["kind"] == "run_ended" else str(event["kind"])
        if kind in _ENDS:
            self._close(*_ENDS[kind], event)
        elif kind in _RULES:
            self._note(kind, _RULES[kind], event)

    def step(self, now: float) -> None:
        """Recalls what has been open for long, and sees to the outbox."""
        for name, incident in list(self.open.items()):
            # A clock that was set back recalls too early rather than never.
            if abs(now - incident.sent_at) < self._settings.remind_seconds:
                continue
            if name == DEAD_LETTER and incident.last_at <= incident.sent_at:
                self.forget(name)
                continue
            self._send("Still: " + incident.text, incident, incident.numbers, "", now)
            self._keep({**self.open, name: dataclasses.replace(incident, sent_at=now)})
        if self.outbox is not None:
            self.outbox.step(now)

    def _note(self, kind: str, rule: _Rule, event: dict[str, Any]) -> None:
        now, text = self._clock(), str(event["text"])
        is_open = rule.incident in self.open
        known = self.open.get(rule.incident) or Incident(since=now, last_at=now, sent_at=now)
        key = f"{kind} {event.get('request_id')}" if kind in _RUN_EVENTS else kind
        numbers = {name: value for name, value in event.items() if name not in ("time", "kind", "text")}
        incident = dataclasses.replace(
            known,
            last_at=now,
            amount=known.amount + float(event.get("messages") or 0),
            text=text,
            told=(*known.told, key)[-50:] if key not in known.told else known.told,
            numbers=numbers,
        )
        if key not in known.told:
            self._send(f"{rule.title}: {text}", incident, numbers, rule.done, now)
            incident = dataclasses.replace(incident, sent_at=now)
        if is_open or kind not in _AFTERMATH:
            self._keep({**self.open, rule.incident: incident})

    def forget(self, name: str) -> None:
        """Ends an incident in silence: its end was told by another replica, or there is nobody to tell it of."""
        if name in self.open:
            self._keep({key: each for key, each in self.open.items() if key != name})

    def _close(self, name: str, title: str, event: dict[str, Any]) -> None:
        incident = self.open.get(name)
        if incident is None:
            return
        self._send(f"{title}: {event['text']}", incident, event, "", self._clock())
        self.forget(name)

    def _send(self, text: str, incident: Incident, numbers: dict[str, Any], done: str, now: float) -> None:
        if self.outbox is not None:
            amounts = {**numbers, "messages": incident.amount} if incident.amount else numbers
            payload = compose(text, numbers=amounts, since=incident.since, done=done, link=self._settings.status_url)
            self.outbox.put(payload, now=now)

    def _keep(self, incidents: dict[str, Incident]) -> None:
        self._documents.write_documents(
            {INCIDENTS: {name: dataclasses.asdict(each) for name, each in incidents.items()}}
        )
        self.open = incidents
