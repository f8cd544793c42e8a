"""Writes docs/dependencies.md: what the requirements files name, how far each is behind, and why it is there.

`python -m requirements.dependencies > docs/dependencies.md` asks the index that pip is configured for, which must
answer in JSON with times of upload (PEP 691 and 700). dependencies.toml says what no index knows.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import tomllib
from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

FOLDER = Path(__file__).resolve().parent
_PIN = re.compile(r"^([\w.-]+)==([^\s;]+)", re.M)
_JSON = "application/vnd.pypi.simple.v1+json"
_HEADER = """\
# Dependencies

Written by `make dependencies` on {today}, not by hand. Reasons and replacements: `requirements/dependencies.toml`,
versions in the locks, releases as the package index told them on that day. Only what a requirements file of ours names
is here; what that brings along is in the locks. The newest version leaves out pre-releases and withdrawn ones.

| package | locked | newest | last release | why it is there | what would replace it |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Release:
    """The newest version of a package that its index offers, and the day of its first file."""

    version: Version
    day: date


def canonical(name: str) -> str:
    """A package's name as indexes compare it.

    >>> canonical("typing_extensions")
    'typing-extensions'
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def locked_versions(folder: Path = FOLDER) -> dict[str, dict[str, list[str]]]:
    """Each package that a requirements file names -> its versions -> the environments that have it."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted([*folder.glob("*.in"), *folder.glob("*.txt")]):
        environment = path.stem.split(".")[0]
        lines = [line for line in path.read_text().splitlines() if re.match(r"\w", line)]
        names = {canonical(re.split(r"[\[<>=!~; ]", line)[0]) for line in lines}
        lock = path.with_name(f"{path.stem.removesuffix('.no-deps')}.lock") if path.suffix == ".in" else path
        pins = {canonical(name): version for name, version in _PIN.findall(lock.read_text())}
        for name in names:
            environments = found[name][pins[name]]
            environments += [] if environment in environments else [environment]
    return found


def locked_cell(versions: dict[str, list[str]]) -> str:
    """The table's cell for `locked_versions` of one package: one version alone, several with their environments."""
    if len(versions) == 1:
        return next(iter(versions))
    return "; ".join(f"{version} ({', '.join(environments)})" for version, environments in versions.items())


def newest_release(files: list[dict[str, object]]) -> Release | None:
    """The newest version among an index's `files`, without pre-releases and withdrawn ones; None = there is none."""
    found: dict[Version, date] = {}
    for file in files:
        try:
            parse = parse_wheel_filename if str(file["filename"]).endswith(".whl") else parse_sdist_filename
            version = parse(str(file["filename"]))[1]
        except (InvalidWheelFilename, InvalidSdistFilename):
            continue  # an installer or an egg of old
        if not (version.is_prerelease or file.get("yanked") or "upload-time" not in file):
            day = date.fromisoformat(str(file["upload-time"])[:10])
            found[version] = min(day, found.get(version, day))
    return Release(max(found), found[max(found)]) if found else None


def main() -> None:
    """Prints the page.

    Raises:
        ValueError: the index answers in no JSON.
    """
    from pip._internal.commands import create_command  # pip alone knows its index, certificate and credentials

    command = create_command("download")
    options, _ = command.parse_args([])
    session = command._build_session(options)
    reasons = tomllib.loads((FOLDER / "dependencies.toml").read_text())
    today = date.today()
    rows = []
    for name, versions in sorted(locked_versions().items()):
        answer = session.get(f"{options.index_url.rstrip('/')}/{name}/", headers={"Accept": _JSON})
        answer.raise_for_status()
        if not answer.headers["Content-Type"].startswith(_JSON):
            raise ValueError(f"the index answers for {name} in {answer.headers['Content-Type']}, expected {_JSON}")
        release = newest_release(answer.json()["files"])
        newest, last = (str(release.version), str(release.day)) if release else ("none", "none")
        years = (today - release.day).days // 365 if release else 0
        last += f", {years} year{'s' if years > 1 else ''} ago" if years else ""
        rows.append("| " + " | ".join([name, locked_cell(versions), newest, last, *reasons[name]]) + " |\n")
    print(_HEADER.format(today=today) + "".join(rows), end="")


if __name__ == "__main__":
    main()
