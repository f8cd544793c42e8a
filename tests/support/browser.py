"""A browser without a screen, for the tests of pages."""

import os
import shutil
import subprocess

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ABSENT = ("gpu", "quic", "background-networking", "component-update", "sync")
FLAGS = ["--headless", "--no-sandbox", "--no-first-run", "--hide-scrollbars", *(f"--disable-{each}" for each in ABSENT)]

needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine (Debian: apt install chromium)")


def browse(tmp_path, *flags: str) -> str:
    """Runs the browser to its end and answers what it printed."""
    # Without a session bus and a display of its own, as on a server; its profile goes with the test.
    environment = {**os.environ, "HOME": str(tmp_path)}
    command = [BROWSER, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
