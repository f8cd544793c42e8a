"""Format a message for a webhook, and send it once. The caller decides when to retry.

The format is the JSON that Slack's incoming webhooks and most other services accept: an object with
`text`. The address must be secret, because everybody who knows it can write to the channel. Error
messages contain neither the address nor the server's reply, which may repeat the address. A
long-lived program reads the address from a file before each message, so that the address can be
changed.
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

_MAX_CHARACTERS = 3000
"""Maximum number of characters of a text, so that people can read it at a glance. Slack truncates
at 40,000."""
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
    text: str, *, numbers: Mapping[str, Any], since: float, done: str, link: str
) -> dict[str, str]:
    r"""Return the message.

    `since` is the start of the incident or the run. `done` describes the action that was taken, and
    `link` is the address of a page with details. `done` and `link` may be empty. The message shows
    the name of the run and the entries of `numbers` that are not None.

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
    lines = [
        text,
        *(f"{name}: {value}" for name, value in fields.items() if value),
        *([link] if link else []),
    ]
    return {"text": _escape_for_slack("\n".join(lines))}


def _format_amounts(numbers: Mapping[str, Any]) -> str:
    known = ((title, numbers.get(name)) for name, title in _AMOUNTS)
    return ", ".join(
        f"{title} {value:.3f}" if abs(value) < 1 and value else f"{title} {value:.10g}"
        for title, value in known
        if isinstance(value, (int, float))
    )


def _escape_for_slack(text: str) -> str:
    """Escape `&`, `<` and `>`, Slack's markup, and truncate a long text between escapes."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return text if len(text) <= _MAX_CHARACTERS else re.sub(r"&[a-z]*$", "", text[:_MAX_CHARACTERS])


_TIMEOUT_SECONDS = 10.0
"""Timeout of the connection and of each read."""
_MAX_RETRY_AFTER_SECONDS = 3600.0
NO_ADDRESS = "the webhook's address is not an http or https address"


class Answer(NamedTuple):
    """Result of one attempt to send a message."""

    state: str
    """`delivered`, `retry` (a later attempt may help) or `refused` (a retry cannot help)."""
    reason: str = ""
    """Reason for a failure, without the secret address."""
    retry_after: float | None = None
    """Seconds to wait before the next attempt, if the server specified this time."""


def post_to_file(
    url_file: Path, body: bytes, *, timeout_seconds: float = _TIMEOUT_SECONDS
) -> Answer:
    """Post `body` (JSON) to the address in `url_file`. Raises nothing.

    An invalid address is reported as `retry`, because a mounted secret may be in the middle of a
    replacement.
    """
    try:
        url = url_file.read_text().strip()
    except (OSError, ValueError) as error:
        return Answer("retry", f"webhook_file cannot be read: {type(error).__name__}")
    answer = post(url, body, timeout_seconds=timeout_seconds)
    return answer._replace(state="retry") if answer.reason == NO_ADDRESS else answer


def post(url: str, body: bytes, *, timeout_seconds: float = _TIMEOUT_SECONDS) -> Answer:
    """Post `body` (JSON) to `url`. Raises nothing."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # the text of this error contains the secret address
        return Answer("refused", NO_ADDRESS)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return Answer("refused", NO_ADDRESS)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, port, timeout=timeout_seconds)
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request(
            "POST", target, body, {"Content-Type": "application/json", "Connection": "close"}
        )
        response = connection.getresponse()
        return _answer(response.status, response.getheader("Retry-After"))
    except (
        ValueError,
        http.client.InvalidURL,
    ):  # raised for an invalid host name or path; the text of the error contains the address
        return Answer("refused", NO_ADDRESS)
    except (OSError, http.client.HTTPException) as error:
        return Answer("retry", f"no answer: {type(error).__name__}")
    finally:
        connection.close()


def _answer(status: int, retry_after: str | None) -> Answer:
    if 200 <= status < 300:
        return Answer("delivered")
    if status in (408, 425, 429) or status >= 500:
        return Answer("retry", f"answered {status}", _parse_retry_after(retry_after))
    # After a redirect, the POST would become a GET of another page. Every other HTTP status means
    # that the address or the message is wrong.
    return Answer("refused", f"answered {status}")


def _parse_retry_after(text: str | None) -> float | None:
    """Return the seconds to wait from a Retry-After header, which holds seconds or an HTTP date.

    Returns None for any other value.

    >>> _parse_retry_after("120"), _parse_retry_after("soon"), _parse_retry_after("999999")
    (120.0, None, 3600.0)
    """
    try:
        return (
            min(float(Retry().parse_retry_after(text)), _MAX_RETRY_AFTER_SECONDS) if text else None
        )
    except InvalidHeader:
        return None
