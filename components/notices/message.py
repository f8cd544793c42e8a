"""One message in the form of Slack's incoming webhooks; other services use its `text` alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

MAX_FIELD_CHARACTERS = 1900
"""Slack takes 2000 characters in a field, 3000 in a section, 150 in a header, and ten fields."""
_AMOUNTS = (
    ("auc", "AUC"),
    ("auc_low", "95 % from"),
    ("auc_high", "to"),
    ("threshold", "threshold"),
    ("rows", "rows"),
    ("clicks", "clicks"),
    ("drifted_columns", "drifted columns"),
    ("messages", "messages"),
)


def compose(
    text: str, *, numbers: Mapping[str, Any], since: float, done: str, link: str, link_title: str = "status page"
) -> dict[str, Any]:
    """The message.

    Args:
        text: What happened, in one line.
        numbers: Of the event; the amounts among them are shown, one that does not exist is left out.
        since: When the incident, or the run, began, seconds since the epoch.
        done: What was done; empty = nothing to say.
        link: Where people find more; empty = none.
        link_title: What is there.
    """
    begun = datetime.fromtimestamp(since, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    fields = {"How much": _how_much(numbers), "Since": begun, "Done": done, "Run": str(numbers.get("request_id") or "")}
    shown = {name: value for name, value in fields.items() if value}
    what = [text, *(f"{name}: {value}" for name, value in shown.items()), *([link] if link else [])]
    sections: list[dict[str, Any]] = [
        {"type": "section", "text": {"type": "mrkdwn", "text": _clean(text)}},
        {
            "type": "section",
            "fields": [{"type": "mrkdwn", "text": f"*{name}*\n{_clean(value)}"} for name, value in shown.items()],
        },
    ]
    if link:
        context = {"type": "mrkdwn", "text": f"<{link}|{link_title}>"}
        sections.append({"type": "context", "elements": [context]})
    return {"text": _clean("\n".join(what)), "blocks": sections}


def _how_much(numbers: Mapping[str, Any]) -> str:
    known = ((title, numbers.get(name)) for name, title in _AMOUNTS)
    return ", ".join(
        f"{title} {value:.3f}" if abs(value) < 1 and value else f"{title} {value:.10g}"
        for title, value in known
        if isinstance(value, (int, float))
    )


def _clean(text: str) -> str:
    """Slack gives `&`, `<` and `>` a meaning of its own, and counts their escapes."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return text if len(text) <= MAX_FIELD_CHARACTERS else re.sub(r"&[a-z]*$", "", text[:MAX_FIELD_CHARACTERS])
