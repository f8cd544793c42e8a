"""Finds Google's Pub/Sub emulator on this machine: a part of the Cloud SDK, in Java, which evergreen does not bring.

Starting it as a process of the demo is `log_server`'s; what is published in it is gone when it ends.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from components.runtime.errors import ContractError

HOST_VARIABLE = "PUBSUB_EMULATOR_HOST"
"""Tells Google's client library to talk to an emulator, without credentials."""
_NAME = "cloud-pubsub-emulator"
_INSIDE_SDK = Path("platform/pubsub-emulator/bin") / _NAME
_USUAL_SDKS = (
    "/usr/lib/google-cloud-sdk",
    "/usr/share/google-cloud-sdk",
    "/opt/google-cloud-sdk",
    "/usr/local/google-cloud-sdk",
    "/snap/google-cloud-cli/current",
    "/snap/google-cloud-sdk/current",
    "/opt/homebrew/share/google-cloud-sdk",
    "/usr/local/share/google-cloud-sdk",
)


def find_emulator(environment: Mapping[str, str] = os.environ, sdks: tuple[str, ...] = _USUAL_SDKS) -> Path:
    """The emulator's start script: on PATH, beside gcloud, in `CLOUDSDK_ROOT_DIR`, or where the SDK usually lies.

    Raises:
        ContractError: it is not there, or no Java to run it; says which.
    """
    search = environment.get("PATH", "")
    found = next((path for path in _candidates(environment, search, sdks) if os.access(path, os.X_OK)), None)
    if found is None:
        raise ContractError(
            "Google's Pub/Sub emulator is not on this machine, expected it on PATH, in the Cloud SDK of gcloud or in "
            "CLOUDSDK_ROOT_DIR: install it with 'gcloud components install pubsub-emulator' or your package manager's "
            "google-cloud-cli-pubsub-emulator"
        )
    home = environment.get("JAVA_HOME")
    if not (home and os.access(Path(home) / "bin" / "java", os.X_OK)) and shutil.which("java", path=search) is None:
        raise ContractError(f"{found} needs Java, expected 'java' on PATH or in JAVA_HOME: install a Java runtime")
    return found


def emulator_command(script: Path, port: int) -> list[str]:
    """Starts the emulator on loopback; it answers HTTP 200 on `/` when it is ready."""
    return [str(script), "--host=127.0.0.1", f"--port={port}"]


def _candidates(environment: Mapping[str, str], search: str, sdks: tuple[str, ...]) -> Iterator[Path]:
    if on_path := shutil.which(_NAME, path=search):
        yield Path(on_path)
    roots = [Path(environment["CLOUDSDK_ROOT_DIR"])] if environment.get("CLOUDSDK_ROOT_DIR") else []
    if gcloud := shutil.which("gcloud", path=search):
        roots.append(Path(gcloud).resolve().parents[1])
    if home := environment.get("HOME"):
        roots.append(Path(home) / "google-cloud-sdk")
    for root in (*roots, *map(Path, sdks)):
        yield root / _INSIDE_SDK
