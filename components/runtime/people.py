"""Who asks: the name that journals keep of a person or a process.

Joins every command that writes a journal. Nobody is authenticated by it.
"""

import getpass
import os
import socket


def whoami() -> str:
    """user@host of this process; the user's number where it has no name, as in a container."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
