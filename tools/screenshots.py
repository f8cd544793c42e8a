"""Take the pictures of README.md from a finished demo: the status page, light and dark.

`make screenshots` runs this program after `make demo`. The program needs Chromium.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from demo.environments import REPOSITORY
from evergreen.runtime.errors import PermanentError
from evergreen.runtime.exit_codes import exits_with_code
from evergreen.runtime.flags import CommandParser

FOLDER = REPOSITORY / "docs" / "images"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SCHEMES = {"light": "1", "dark": "0"}
"""Value of Blink's `preferredColorScheme` for each picture, by the name of the picture."""
WIDTH, HEIGHT = 1280, 446
WAIT_SECONDS = 120.0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the program's flags."""
    parser = CommandParser(prog="python -m tools.screenshots", description=__doc__)
    parser.add_argument("--demo", type=Path, default=Path("build/demo"), help="finished demo")
    return parser


@exits_with_code
def main() -> int:
    """Serve the demo and take each picture."""
    demo = build_parser().parse_args().demo.resolve()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise PermanentError(f"none of {', '.join(BROWSERS)} is installed")
    address = demo / "monitor" / "http.json"
    address.unlink(missing_ok=True)
    served = subprocess.Popen([sys.executable, "-m", "cli", "open", str(demo)], cwd=REPOSITORY)
    try:
        url = _wait_for(address, served)
        for name, scheme in SCHEMES.items():
            picture = FOLDER / f"status-{name}.png"
            _take(browser, url=url, scheme=scheme, picture=picture)
            print(f"{picture}: {picture.stat().st_size:,} bytes")
    finally:
        served.send_signal(signal.SIGINT)
        served.wait(60)
    return 0


def _wait_for(address: Path, served: subprocess.Popen[bytes]) -> str:
    """Return the address of the status page once the monitor has written it."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not address.exists():
        if served.poll() is not None or time.monotonic() > deadline:
            raise PermanentError(f"the demo wrote no {address} within {WAIT_SECONDS:g} s")
        time.sleep(0.2)
    found = json.loads(address.read_text())
    return f"http://{found['host']}:{found['port']}/"


def _take(browser: str, *, url: str, scheme: str, picture: Path) -> None:
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                browser,
                "--headless",
                "--no-sandbox",
                "--hide-scrollbars",
                f"--user-data-dir={profile}",
                f"--window-size={WIDTH},{HEIGHT}",
                f"--blink-settings=preferredColorScheme={scheme}",
                "--virtual-time-budget=5000",
                f"--screenshot={picture}",
                url,
            ],
            check=True,
            capture_output=True,
            timeout=90,
        )


if __name__ == "__main__":
    sys.exit(main())
