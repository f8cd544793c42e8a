"""Read and replace the folders and the server that a compiled pipeline names.

Before a machine runs a pipeline that was compiled for another machine, it replaces the folders and
the server. Folders and server are not parameters of a run. The placement sets folders and servers,
and each step has them as constants. `package` reads and writes the files.
"""

from collections.abc import Iterator, Mapping
from typing import Any

LOCATIONS = ("lake", "store", "work", "server", "device", "served")
"""Names of the folders and servers that a compiled pipeline contains. These names are arguments of
steps and fields of `placement.Placement`."""


def locations_of(document: Any) -> dict[str, str]:
    """Return the locations that a compiled pipeline names.

    Args:
        document: The pipeline's IR, parsed.

    Raises:
        KeyError: A folder or server is missing in the pipeline. Pipelines of older revisions have
            parameters for folders and servers.
    """
    found = {name: given["runtimeValue"]["constant"] for name, given in _given(document)}
    return {name: str(found[name]) for name in LOCATIONS}


def describe_locations(locations: Mapping[str, str]) -> str:
    """Return a line of text that describes the folders and servers.

    >>> folders = {name: f"/evergreen/{name}" for name in ("lake", "store", "work")}
    >>> locations = {**folders, "server": "onnxruntime", "device": "cpu", "served": ""}
    >>> describe_locations(locations).partition(", work ")[2]
    '/evergreen/work, served by onnxruntime on cpu'
    """
    served = f", served rows {locations['served']}" if locations["served"] else ""
    folders = ", ".join(f"{name} {locations[name]}" for name in LOCATIONS[:3])
    return f"{folders}, served by {locations['server']} on {locations['device']}{served}"


def replace_locations(document: Any, locations: Mapping[str, str]) -> None:
    """Replace the folders and servers in a compiled pipeline."""
    for name, given in _given(document):
        if name in locations:
            given["runtimeValue"]["constant"] = locations[name]


def _given(document: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the value of each task argument that is a folder or a server."""
    for group in (document["root"], *document["components"].values()):
        for task in group.get("dag", {}).get("tasks", {}).values():
            parameters = task.get("inputs", {}).get("parameters", {})
            yield from (
                (name, given)
                for name, given in parameters.items()
                if name in LOCATIONS and "runtimeValue" in given
            )
