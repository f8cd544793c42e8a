"""Messages to people over a webhook: their form, and one POST of one. When to try again is the caller's decision.

The form is the JSON that Slack's incoming webhooks, and most other services, take: an object with `text`. The address
is a secret (who knows it can write to the channel): no error contains it, or what the server says about it. A
long-lived program reads it from a file each time it sends, so that it can be changed.
"""

import http.client
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from urllib3.exceptions import InvalidHeader
from urllib3.util import Retry

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


TIMEOUT_SECONDS = 10.0
"""To connect, and for each read."""
MAX_RETRY_AFTER_SECONDS = 3600.0
NO_ADDRESS = "what should be the webhook's address is no http or https address"


class Answer(NamedTuple):
    """The result of one attempt."""

    state: str
    """`delivered`, `retry` (later) or `refused` (never)."""
    reason: str = ""
    """Without the address."""
    retry_after: float | None = None
    """Seconds that the server asked for."""


def post_to_file(url_file: Path, body: bytes, *, timeout_seconds: float = TIMEOUT_SECONDS) -> Answer:
    """Sends `body` (JSON) to the address that `url_file` holds; raises nothing.

    A wrong address is a reason to try again: a mounted secret may just be being replaced.
    """
    try:
        url = url_file.read_text().strip()
    except (OSError, ValueError) as error:
        return Answer("retry", f"webhook_file cannot be read: {type(error).__name__}")
    answer = post(url, body, timeout_seconds=timeout_seconds)
    return answer._replace(state="retry") if answer.reason == NO_ADDRESS else answer


def post(url: str, body: bytes, *, timeout_seconds: float = TIMEOUT_SECONDS) -> Answer:
    """Sends `body` (JSON) to `url`; raises nothing."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # its text holds the address
        return Answer("refused", NO_ADDRESS)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return Answer("refused", NO_ADDRESS)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, port, timeout=timeout_seconds)
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("POST", target, body, {"Content-Type": "application/json", "Connection": "close"})
        response = connection.getresponse()
        return _answer(response.status, response.getheader("Retry-After"))
    except (ValueError, http.client.InvalidURL):  # a name or path that no request can hold; its text holds it too
        return Answer("refused", NO_ADDRESS)
    except (OSError, http.client.HTTPException) as error:
        return Answer("retry", f"no answer: {type(error).__name__}")
    finally:
        connection.close()


def _answer(status: int, retry_after: str | None) -> Answer:
    if 200 <= status < 300:
        return Answer("delivered")
    if status in (408, 425, 429) or status >= 500:
        return Answer("retry", f"answered {status}", parse_retry_after(retry_after))
    # A redirect would turn the POST into a GET elsewhere; anything else is a wrong address or message.
    return Answer("refused", f"answered {status}")


def parse_retry_after(text: str | None) -> float | None:
    """Seconds to wait, from the header's number of seconds or its HTTP date; None where there is neither.

    >>> parse_retry_after("120"), parse_retry_after("soon"), parse_retry_after("999999")
    (120.0, None, 3600.0)
    """
    try:
        return min(float(Retry().parse_retry_after(text)), MAX_RETRY_AFTER_SECONDS) if text else None
    except InvalidHeader:
        return None
