"""One message as the JSON that Slack's incoming webhooks, and most other services, take: an object with `text`."""

import re
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

MAX_CHARACTERS = 3000
"""Of the text: what people read at a glance. Slack cuts a text at 40,000."""
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


def compose(text: str, *, numbers: Mapping[str, Any], since: float, done: str, link: str) -> dict[str, str]:
    r"""The message.

    `since` is when the incident, or the run, began; `done`, what was done, and `link`, where people find more, may be
    empty. Of `numbers` the amounts and the run's name are shown; one that is None is left out.

    >>> compose("auc < 0.7", numbers={"auc": None, "rows": 20_000}, since=0.0, done="", link="")
    {'text': 'auc &lt; 0.7\nHow much: rows 20000\nSince: 1970-01-01 00:00:00 UTC'}
    """
    begun = datetime.fromtimestamp(since, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    fields = {
        "How much": _format_amounts(numbers),
        "Since": begun,
        "Done": done,
        "Run": str(numbers.get("request_id") or ""),
    }
    lines = [text, *(f"{name}: {value}" for name, value in fields.items() if value), *([link] if link else [])]
    return {"text": _escape_for_slack("\n".join(lines))}


def _format_amounts(numbers: Mapping[str, Any]) -> str:
    known = ((title, numbers.get(name)) for name, title in _AMOUNTS)
    return ", ".join(
        f"{title} {value:.3f}" if abs(value) < 1 and value else f"{title} {value:.10g}"
        for title, value in known
        if isinstance(value, (int, float))
    )


def _escape_for_slack(text: str) -> str:
    """Escapes `&`, `<` and `>`, which are markup to Slack, and cuts a long text, but not in the middle of an escape."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return text if len(text) <= MAX_CHARACTERS else re.sub(r"&[a-z]*$", "", text[:MAX_CHARACTERS])
