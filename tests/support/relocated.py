"""Files of an installation that a test moves: other paths, and no checksums, which a person who edits removes too."""

import re
from pathlib import Path

_CHECKSUM = re.compile(r',\s*"crc32":\s*"[0-9a-f]{8}"')


def replace_in_documents(paths: list[Path], old: str, new: str) -> None:
    """Replaces `old` in files of JSON, or of lines of it; those that name it lose their checksums."""
    for path in paths:
        if old in (text := path.read_text()):
            path.write_text(_CHECKSUM.sub("", text.replace(old, new)))
