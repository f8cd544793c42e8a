"""The monitor's own log lines: text for people, or one JSON object a line for whoever collects a cluster's logs.

What the lines say is their modules'. The field names are those that Google Cloud Logging and most collectors know.
"""

import json
import logging
from datetime import datetime, timezone

TEXT, JSON = "text", "json"
FORMATS = (TEXT, JSON)


class JsonFormatter(logging.Formatter):
    """One JSON object a record: `time` (ISO 8601 UTC), `severity`, `logger`, `message`, `exception` if any."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "severity": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logging(style: str) -> None:
    """Sends everything from INFO up to standard error in `style`, one of `FORMATS`."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if style == JSON else text)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
