"""Parser of event log URLs: `scheme://authority/path?option=value`.

Error messages show the URL without its secrets, and the expected form. Each backend reads its own
options. `evergreen.events.locations` chooses the backend for a scheme.
"""

import re
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

from evergreen.config.reader import read_query
from evergreen.runtime.errors import ContractError

S = TypeVar("S")

_USER = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*:)?//(?!/)[^?#]*@")
_SECRET_OPTION = re.compile(
    r"([?&][^=&]*(?:pass|secret|token|key|credential)[^=&]*=)[^&#]*", re.IGNORECASE
)


def redacted(url: str) -> str:
    """Return a URL without its user, its password, and options that look like secrets.

    >>> redacted("kafka://me:pa/ss@host:9092/topic?group=g&sasl.password=p")
    'kafka://***@host:9092/topic?group=g&sasl.password=***'
    >>> redacted("sqlite:////home/me@work/log.db")
    'sqlite:////home/me@work/log.db'
    """
    return _SECRET_OPTION.sub(r"\1***", _USER.sub(lambda found: f"{found[1] or ''}//***@", url))


@dataclass(frozen=True)
class LogUrl:
    """The parts of one URL, percent-decoded."""

    text: str
    scheme: str
    authority: str
    """Part of the URL between `//` and the next `/`."""
    path: str
    """Text after the `/` that ends the authority."""
    options: dict[str, str]

    @classmethod
    def parse(cls, text: str) -> "LogUrl":
        """Return the parts of the URL `text`. If an option occurs twice, its last value is used.

        Raises:
            ContractError: `text` is not a URL.
        """
        try:
            parts = urlsplit(text)
        except ValueError as error:
            raise ContractError(f"log is {redacted(text)!r}, expected a URL: {error}") from error
        options = {
            name: values[-1]
            for name, values in parse_qs(parts.query, keep_blank_values=True).items()
        }
        return cls(text, parts.scheme, unquote(parts.netloc), unquote(parts.path[1:]), options)

    def refuse(self, expected: str) -> ContractError:
        """Return the error that names the URL and the expected form.

        The caller raises the returned error.
        """
        return ContractError(f"log is {redacted(self.text)!r}, {expected}")

    def settings(self, kind: type[S]) -> S:
        """Return the options as a section of settings.

        Raises:
            ContractError: An option is unknown or has a wrong value.
        """
        return read_query(kind, self.options, source=f"log {redacted(self.text)!r}")
