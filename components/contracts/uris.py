"""Where a URI of a manifest lies on this machine.

Joins every step that reads or writes data named by URI. Only `file://` and plain absolute paths are served so far:
on a cluster the steps share a mounted volume; bucket access is added here, in one place, when it comes.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlparse

from components.contracts.errors import ContractError


def local_path(uri: str) -> Path:
    """The absolute local path that `uri` names.

    Raises:
        ContractError: `uri` is empty, relative, or of a scheme that is not mounted on this machine.

    >>> str(local_path("file:///data/a%20b")), str(local_path("/data/a b"))
    ('/data/a b', '/data/a b')
    """
    parsed = urlparse(uri)
    if parsed.scheme == "file" and parsed.netloc in ("", "localhost") and parsed.path.startswith("/"):
        return Path(unquote(parsed.path))
    if not parsed.scheme and uri.startswith("/"):
        return Path(uri)
    raise ContractError(f"uri is {uri!r}, expected file:///... or an absolute path")
