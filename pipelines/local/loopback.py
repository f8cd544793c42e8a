"""HTTP to this machine itself, whatever proxy the environment names."""

from __future__ import annotations

import urllib.request

LOOPBACK = "127.0.0.1"
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens URLs without a proxy."""
