"""Writes the locks of one or more environments from their `.in` files: installs them afresh and freezes the result.

For maintainers, after editing an `.in` file: `make lock ENVIRONMENT=training`. A line `# no-deps: X` in an `.in` file
is installed without its dependencies.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
NOT_LOCKED = ("pip==", "wheel==")


def lock(environment: str) -> None:
    """Resolves one environment and rewrites its locks: the image's, and that of its tests where it has any."""
    kinds = [kind for kind in ("", ".test") if (FOLDER / f"{environment}{kind}.in").exists()]
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([sys.executable, "-m", "venv", scratch], check=True)
        pip = [f"{scratch}/bin/python", "-m", "pip", "--disable-pip-version-check"]
        image: list[str] = []
        for kind in kinds:
            wanted = FOLDER / f"{environment}{kind}.in"
            constraints = Path(scratch) / "constraints.txt"
            constraints.write_text("\n".join(image))
            subprocess.run([*pip, "install", "-q", "-r", str(wanted), "-c", str(constraints)], check=True)
            marker = "# no-deps: "
            for line in wanted.read_text().splitlines():
                if line.startswith(marker):
                    subprocess.run([*pip, "install", "-q", "--no-deps", line.removeprefix(marker)], check=True)
            frozen = subprocess.run([*pip, "freeze", "--all"], check=True, capture_output=True, text=True).stdout
            # A local version (+cpu) names one index's build of the pinned version.
            lines = [line.split("+")[0] for line in frozen.splitlines() if not line.startswith(NOT_LOCKED)]
            added = [line for line in lines if line not in image]
            purpose = " on top, for tests" if kind else " and its images" if ".test" in kinds else ""
            header = f"# Pinned packages of the {environment} environment{purpose}. Written by `make lock`."
            (FOLDER / f"{environment}{kind}.lock").write_text("\n".join([header, *added]) + "\n")
            image = lines


if __name__ == "__main__":
    for name in sys.argv[1:]:
        lock(name)
