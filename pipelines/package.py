"""Write the compiled pipeline for a placement, and read its parameters, locations and tag.

The file is read before a run, so that a wrong name or value is reported at once and not later by a
server. kfp is needed only for writing.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from evergreen.contracts.manifests import NONE, SCRATCH
from evergreen.runtime.errors import FROM_SCRATCH, ContractError
from pipelines.locations import LOCATIONS, locations_of, replace_locations

if TYPE_CHECKING:
    from pipelines.placement import Placement


def compile_pipeline(path: Path, placement: "Placement") -> None:
    """Write the compiled pipeline to the YAML file `path` in one step."""
    from kfp import compiler

    from pipelines.retraining import retraining_pipeline

    path.parent.mkdir(parents=True, exist_ok=True)
    # The compiler cannot write atomically, and requires a file name that ends in `.yaml`.
    aside = path.with_name(f".{path.stem}.{os.getpid()}.yaml")
    try:
        compiler.Compiler().compile(retraining_pipeline(placement), str(aside))
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Loader of libyaml, if PyYAML was built with libyaml. This loader parses the file in 0.02 s
instead of 0.14 s, and a run parses the file twice."""
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""Dumper of libyaml, if PyYAML was built with libyaml."""


def read_parameters(
    package: Path, pairs: Sequence[str], settings: Sequence[str] = (), *, from_scratch: bool = False
) -> dict[str, str]:
    """Return pipeline parameters by name. The values stay strings and are not interpreted.

    Args:
        package: File of the compiled pipeline.
        pairs: Parameters as NAME=VALUE.
        settings: Settings as SECTION.NAME=VALUE, appended to the parameter `settings`.
        from_scratch: Whether to train without a parent, and without a comparison with a champion.

    Raises:
        ContractError: the file is absent or not a compiled pipeline, a pair has no `=`, or the
            pipeline has no such parameter. A run from scratch also raises the error if a pair names
            a model.
    """
    names = _parameters(package).keys()
    parameters: dict[str, str] = {}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        if not separator:
            raise ContractError(f"parameter {pair!r} has no '=', expected NAME=VALUE")
        if name not in names:
            decided = (
                f"; `evergreen compile` sets {name}, from the placement or a flag"
                if name in LOCATIONS
                else ""
            )
            raise ContractError(
                f"parameter {name} is unknown, expected some of {', '.join(sorted(names))}{decided}"
            )
        parameters[name] = text
    for name in SCRATCH if from_scratch else ():
        if parameters.setdefault(name, NONE) != NONE:
            raise ContractError(
                f"parameter {name} is {parameters[name]}, expected {NONE} with {FROM_SCRATCH}"
            )
    if settings:
        parameters["settings"] = " ".join(
            filter(None, [parameters.get("settings"), shlex.join(settings)])
        )
    return parameters


def run_outcome_pod(package: Path) -> tuple[str, str, str]:
    """Return image, volume claim and mount path of the exit handler.

    Another pod that needs the model registry can use the same image, claim and path.

    Raises:
        ContractError: the file is absent or not a compiled pipeline of ours.
    """
    try:
        pipeline, platform = _read_documents(package)
        executors = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
        (volume,) = executors["exec-run-outcome"]["pvcMount"]
        image = pipeline["deploymentSpec"]["executors"]["exec-run-outcome"]["container"]["image"]
        return image, volume["constant"], volume["mountPath"]
    except (KeyError, TypeError, ValueError) as error:
        raise _not_a_package(package) from error


def image_tag(package: Path) -> str:
    """Return the common tag of all images of the compiled pipeline, a git revision.

    Raises:
        ContractError: the file is absent or not a compiled pipeline, or its images lack a common
            immutable tag.
    """
    document = _read_document(package)
    try:
        images = [
            each["container"]["image"] for each in document["deploymentSpec"]["executors"].values()
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise _not_a_package(package) from error
    tags = {image.rpartition("/")[2].partition(":")[2] for image in images}
    if len(tags) != 1 or not tags.isdisjoint({"", "dev", "latest"}):
        found = ", ".join(sorted(tag or "none" for tag in tags))
        raise ContractError(
            f"images of {package} have tag {found}, expected one revision: evergreen compile --tag"
        )
    return str(tags.pop())


def read_locations(package: Path) -> dict[str, str]:
    """Return the folders and servers in a compiled pipeline, by name (`locations.LOCATIONS`).

    Raises:
        ContractError: the file is absent or not a compiled pipeline, or an older revision compiled
            it with locations as parameters.
    """
    try:
        return locations_of(_read_document(package))
    except (KeyError, TypeError, AttributeError) as error:
        raise ContractError(
            f"package {package} names no model registry or lake, expected a file from this "
            "revision's `evergreen "
            "compile`"
        ) from error


def with_locations(package: Path, locations: Mapping[str, str]) -> str:
    """Return the text of the compiled pipeline after replacing folders and servers.

    Raises:
        ContractError: the file is absent or not a compiled pipeline.
    """
    documents = _read_documents(package)
    try:
        replace_locations(documents[0], locations)
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        raise _not_a_package(package) from error
    return str(yaml.dump_all(documents, Dumper=_DUMPER, sort_keys=False))


def _parameters(package: Path) -> dict[str, Any]:
    try:
        return dict(_read_document(package)["root"]["inputDefinitions"]["parameters"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _not_a_package(package) from error


def _read_document(package: Path) -> Any:
    return next(iter(_read_documents(package)), None)


def _read_documents(package: Path) -> list[Any]:
    """Return the pipeline and, if the file has a Kubernetes section, this section."""
    try:
        return list(yaml.load_all(package.read_text(), _LOADER))
    except OSError as error:
        raise ContractError(f"package {package} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise _not_a_package(package) from error


def _not_a_package(package: Path) -> ContractError:
    return ContractError(
        f"package {package} is not a compiled pipeline, expected a file from `evergreen compile`"
    )
