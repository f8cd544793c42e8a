"""Edits the files of a moved installation: sets new paths and removes checksums."""

import re
from pathlib import Path

_CHECKSUM = re.compile(r',\s*"crc32":\s*"[0-9a-f]{8}"')


def replace_in_documents(paths: list[Path], old: str, new: str) -> None:
    """Replace `old` in JSON or JSON lines files, and remove the checksums of the changed files."""
    for path in paths:
        if old in (text := path.read_text()):
            path.write_text(_CHECKSUM.sub("", text.replace(old, new)))
