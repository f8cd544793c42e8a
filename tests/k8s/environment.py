"""Environment, command and writable folders of the processes in a rendered pod.

Tests use this module to compare manifests with code. The module does not depend on Evergreen's
settings.
"""

import json
import re
from pathlib import Path, PurePosixPath

from testing.paths import REPOSITORY
from tests.support.rendering import Manifest, find


def container(workload: Manifest, name: str) -> Manifest:
    """Return the container or init container named `name`."""
    spec = workload["spec"]["template"]["spec"]
    (found,) = [
        c for c in (*spec.get("initContainers", ()), *spec["containers"]) if c["name"] == name
    ]
    return found


def environment_of(manifests: list[Manifest], workload: Manifest, name: str) -> dict[str, str]:
    """Return a container's variables.

    Variables of the container override those of its ConfigMaps.
    """
    found: dict[str, str] = {}
    ours = container(workload, name)
    for source in ours.get("envFrom", ()):
        found |= find(manifests, "ConfigMap", source["configMapRef"]["name"])["data"]
    for entry in ours.get("env", ()):
        if "value" in entry:
            found[entry["name"]] = entry["value"]
    return found


def command(workload: Manifest, name: str, dockerfile: str) -> list[str]:
    """Return the command of the container, or of its image if the container has none."""
    ours = container(workload, name)
    if "command" in ours:
        return [*ours["command"], *ours.get("args", ())]
    (entry,) = re.findall(
        r"^ENTRYPOINT (\[.*\])$", (REPOSITORY / dockerfile).read_text(), re.MULTILINE
    )
    return [*json.loads(entry), *ours.get("args", ())]


def volume_at(workload: Manifest, name: str, path: str) -> tuple[Manifest, bool]:
    """Return the volume that contains `path` in a container, and whether it is writable.

    Raises:
        LookupError: the container mounts no volume at the path.
    """
    mounts = sorted(container(workload, name)["volumeMounts"], key=lambda m: -len(m["mountPath"]))
    for mount in mounts:
        if PurePosixPath(path).is_relative_to(mount["mountPath"]):
            volumes = workload["spec"]["template"]["spec"]["volumes"]
            (volume,) = [v for v in volumes if v["name"] == mount["name"]]
            return volume, not mount.get("readOnly", False)
    raise LookupError(f"{path} lies under no mount of container {name}")


def mounted(workload: Manifest, name: str, text: str, root: Path) -> str:
    """Replace container paths in `text` by paths of the test.

    If a path is below a mount, it gets the matching path below the folder `root`.
    """
    paths = sorted(
        (m["mountPath"] for m in container(workload, name)["volumeMounts"]), key=len, reverse=True
    )
    return re.sub(rf"(?<![\w/.])({'|'.join(map(re.escape, paths))})(?=/|$)", rf"{root}\1", text)
