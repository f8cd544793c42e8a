"""Untrusted text in log lines and terminal listings.

Ids, names and reasons are chosen by publishers of records and by people who start runs. Control
characters in these texts could change the state of the terminal, and a line break could forge a
line of the log. JSON output does not need this protection, because JSON escapes control characters.
"""

import json
import logging
import unicodedata
from datetime import datetime, timezone
from typing import TextIO

_DANGEROUS = frozenset(("Cc", "Cf", "Zl", "Zp", "Cs"))
"""Unicode categories that are escaped: control and format characters, line and paragraph
separators, and lone surrogates."""


def printable(text: str) -> str:
    r"""Return the text as one line, with control characters escaped.

    >>> printable("r-1\n12:00 INFO all is well \x1b[2J\u202e"), printable("Größe 7, 木")
    ('r-1\\n12:00 INFO all is well \\x1b[2J\\u202e', 'Größe 7, 木')
    """
    if text.isprintable():
        return text
    return "".join(
        _escaped(each) if unicodedata.category(each) in _DANGEROUS else each for each in text
    )


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def show(text: str, file: TextIO | None = None) -> None:
    """Print one line of a listing."""
    print(printable(text), file=file)


class LineFormatter(logging.Formatter):
    """Log formatter that writes one line per record, followed by an indented traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the line."""
        return printable(super().formatMessage(record))

    def formatException(self, ei: object) -> str:  # noqa: N802 - logging's name
        """Return the traceback, indented so that none of its lines looks like a log record."""
        text = super().formatException(ei)  # type: ignore[arg-type]
        return "\n".join(f"    {printable(line)}" for line in text.split("\n"))


TIMED = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_as_text(style: str = TIMED, *, level: int = logging.INFO) -> None:
    """Send the log of this process to standard error, one line per record.

    Args:
        style: Format of a line, as for `logging.Formatter`.
        level: Lowest level that is shown.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(style))
    logging.basicConfig(level=level, handlers=[handler])


TEXT, _JSON = "text", "json"
FORMATS = (TEXT, _JSON)


class _JsonFormatter(logging.Formatter):
    """Log formatter that writes one JSON object per record.

    The fields of the object are `time` (ISO 8601 UTC), `severity`, `logger`, `message`, and
    `exception` if there is one.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(
                timespec="milliseconds"
            ),
            "severity": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logging(style: str) -> None:
    """Send log records of level INFO and above to standard error.

    `style` is one of `FORMATS`.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter() if style == _JSON else LineFormatter(TIMED))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
