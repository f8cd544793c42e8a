"""Build the inference client as a separate wheel, for `make client-wheel`.

The wheel is for services that install no other part of Evergreen. The wheel contains
`inference_client` and the modules of `evergreen` that it imports, unchanged. Building needs the
driver's environment and no network.
"""

import argparse
import ast
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from evergreen.runtime.errors import ContractError, PermanentError
from evergreen.runtime.exit_codes import exits_with_code
from evergreen.runtime.flags import CommandParser

_REPOSITORY = Path(__file__).resolve().parents[1]
NAME = "evergreen-client"
_ENTRY, _CORE = "inference_client", "evergreen"
_DEPENDENCIES = ("msgspec", "numpy", "tritonclient[grpc]")
"""Packages that the client always imports. tritonclient also brings matching versions of gRPC and
Protobuf."""
_EXTRAS = {
    "gcs": "google-cloud-storage",
    "kafka": "confluent-kafka",
    "pubsub": "google-cloud-pubsub",
}
"""Optional packages, for a traffic plan in a bucket or for an event log."""
_LOCKS = ("driver.lock", "serving.lock")
"""Lock files that define the wheel's minimum versions. The minimum is the older of a package's
versions in these files. Tests run the wheel with the versions of each lock."""
_PROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "{version}"
description = "Scores and ranks rows on a served Evergreen recommender, and logs the outcomes"
requires-python = ">=3.10"
license = "Apache-2.0"
license-files = ["LICENSE"]
classifiers = ["Private :: Do Not Upload", "Operating System :: POSIX"]
dependencies = {dependencies}

[project.optional-dependencies]
{extras}

[tool.setuptools.packages.find]
include = ["{entry}*", "{core}*"]

[tool.setuptools.package-data]
{entry} = ["py.typed"]
{core} = ["py.typed"]
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags."""
    parser = CommandParser(prog="python -m tools.client_wheel", description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=_REPOSITORY / "build" / "wheels", help="folder of the wheel"
    )
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Build the wheel, and print its path.

    Raises:
        PermanentError: pip could not build the wheel.
    """
    output: Path = build_parser().parse_args(argv).output.resolve()
    with TemporaryDirectory() as folder:
        _write_sources(Path(folder))
        flags = [
            "--no-deps",
            "--no-index",
            "--no-build-isolation",
            "--disable-pip-version-check",
            "--quiet",
        ]
        command = [sys.executable, "-m", "pip", "wheel", *flags, "--wheel-dir", str(output), folder]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise PermanentError(f"pip built no wheel of {NAME}: {done.stderr.strip()}")
    (wheel,) = output.glob(f"{NAME.replace('-', '_')}-{_version()}-*.whl")
    print(wheel)
    return 0


def _write_sources(folder: Path) -> None:
    """Write the wheel's sources into an empty folder."""
    for path in _client_modules().values():
        target = folder / path.relative_to(_REPOSITORY)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    for package in (_ENTRY, _CORE):
        (folder / package / "py.typed").touch()
    (folder / "LICENSE").write_text((_REPOSITORY / "LICENSE").read_text())
    extras = "\n".join(f'{extra} = ["{_requirement(needed)}"]' for extra, needed in _EXTRAS.items())
    dependencies = json.dumps([_requirement(needed) for needed in _DEPENDENCIES])
    text = _PROJECT.format(
        name=NAME,
        entry=_ENTRY,
        core=_CORE,
        version=_version(),
        dependencies=dependencies,
        extras=extras,
    )
    (folder / "pyproject.toml").write_text(text)


def _client_modules() -> dict[str, Path]:
    """Return the files of the client's package and of all modules that it imports, by name.

    Imports inside functions are included.
    """
    found: dict[str, Path] = {}
    waiting = [_ENTRY]
    while waiting:
        name = waiting.pop()
        path = _file_of(name)
        if path is None or name in found:
            continue
        found[name] = path
        parent = name.rpartition(".")[0]
        waiting += [*_imported(path), *([parent] if parent else [])]
    return found


def _file_of(module: str) -> Path | None:
    """Return the file of a module, or None for a class or a function."""
    path = _REPOSITORY / module.replace(".", "/")
    return next(
        (file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None
    )


def _imported(path: Path) -> Iterator[str]:
    """Yield the names that a file imports from the packages of the wheel.

    The names include modules and members of modules.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.partition(".")[0] in (_ENTRY, _CORE)
        ):
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names)


def _requirement(needed: str) -> str:
    """Return the requirement `needed` with the oldest version in the locks as its minimum."""
    name = needed.partition("[")[0]
    texts = [(_REPOSITORY / "requirements" / lock).read_text() for lock in _LOCKS]
    versions = [
        found[1]
        for text in texts
        if (found := re.search(rf"^{name}==([\d.]+)", text, re.MULTILINE))
    ]
    if not versions:
        raise ContractError(
            f"{name} is absent from {', '.join(_LOCKS)}, expected a version in at least one of "
            "these files"
        )
    return f"{needed}>={min(versions, key=lambda text: [int(part) for part in text.split('.')])}"


def _version() -> str:
    return importlib.metadata.version("evergreen")


if __name__ == "__main__":
    raise SystemExit(main())
