"""Parses the project's Dockerfiles, and lays out the content of an image's last stage.

Only the instructions in use are supported: FROM, ARG, COPY of one source, RUN, ENV, WORKDIR, LABEL,
USER, ENTRYPOINT. All other instructions raise an error.
"""

import json
import os
import re
import shlex
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from pipelines.images import DOCKERFILES, ENVIRONMENT_OF_STEP, STEP_OF_VARIANT
from testing.paths import REPOSITORY

VENV = "/opt/venv"
LOCKS = {"validation": "validation-trixie"}
"""Maps an image to its lock, for images whose lock differs from the lock of the step's test
environment. `test_containers.py` compares the versions in the image's lock and in the environment's
lock."""
PROGRAMS = {"inference_client": "demo.simulation", "monitoring": "monitoring"}
"""Images of programs that are not steps of the pipeline, with the module that each image runs.
These images install the driver's lock."""
KNOWN = {"FROM", "ARG", "COPY", "RUN", "ENV", "WORKDIR", "LABEL", "USER", "ENTRYPOINT"}


@dataclass
class Stage:
    """A FROM instruction, and the instructions up to the next FROM."""

    base: str
    name: str = ""
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, keyword: str) -> list[str]:
        return [argument for found, argument in self.instructions if found == keyword]

    def copies(self) -> list[tuple[str, str, str]]:
        """Return the source stage, source path and absolute target of each COPY.

        The stage is an empty text if the source is the build context.
        """
        here, found = "/", []
        for keyword, argument in self.instructions:
            if keyword == "WORKDIR":
                here = os.path.join(here, argument)
            if keyword == "COPY":
                words = argument.split()
                origin = (
                    words.pop(0).removeprefix("--from=") if words[0].startswith("--from=") else ""
                )
                source, target = words
                target += Path(source).name if target.endswith("/") else ""
                found.append((origin, source, os.path.join(here, target)))
        return found

    def variables(self, inherited: dict[str, str]) -> dict[str, str]:
        """Add the ENV variables to those of the base image, and replace `${NAME}` by its value."""
        found = dict(inherited)
        for argument in self.all("ENV"):
            for assignment in shlex.split(argument):
                name, _, value = assignment.partition("=")
                found[name] = re.sub(r"\$\{(\w+)\}", lambda match: found.get(match[1], ""), value)
        return found

    def labels(self, arguments: dict[str, str]) -> dict[str, str]:
        """Return the image's labels.

        Each name of an ARG in a label is replaced by the value in `arguments`, or by its default.
        """
        known: dict[str, str] = {}
        for argument in self.all("ARG"):
            name, _, default = argument.partition("=")
            known[name] = arguments.get(name, default)
        pairs = (
            pair.partition("=") for argument in self.all("LABEL") for pair in shlex.split(argument)
        )
        return {
            name: re.sub(r"\$\{(\w+)\}", lambda match: known[match[1]], value)
            for name, _, value in pairs
        }


def stages(image: str) -> list[Stage]:
    """Return the stages of the image's Dockerfile. The last stage is the image that is shipped."""
    text = (REPOSITORY / DOCKERFILES[image]).read_text()
    text = "\n".join(
        line for line in text.splitlines() if not line.lstrip().startswith("#")
    ).replace("\\\n", " ")
    found: list[Stage] = []
    defaults: dict[str, str] = {}
    for line in filter(None, (line.strip() for line in text.splitlines())):
        keyword, _, argument = line.partition(" ")
        assert keyword in KNOWN, f"{DOCKERFILES[image]}: {keyword} is not supported"
        if keyword == "FROM":
            base, _, name = argument.partition(" AS ")
            found.append(
                Stage(re.sub(r"\$\{(\w+)\}", lambda match: defaults[match[1]], base), name)
            )
        elif not found:
            assert keyword == "ARG", f"{DOCKERFILES[image]}: {keyword} before FROM"
            key, _, default = argument.partition("=")
            defaults[key] = default
        else:
            found[-1].instructions.append((keyword, argument))
    return found


def environment(image: str) -> str | None:
    """Return the environment that a laptop uses instead of the image.

    Returns None if the packages are part of NVIDIA's image.
    """
    return None if image in STEP_OF_VARIANT else ENVIRONMENT_OF_STEP.get(image, "driver")


def lock(image: str) -> str | None:
    """Return the lock that the image installs, without `.lock`.

    Returns None if the image installs no lock, because NVIDIA's base image has the packages.
    """
    return LOCKS.get(image, environment(image))


def module(image: str) -> str:
    """Return the module that `python -m` runs in the image."""
    return PROGRAMS.get(image) or f"components.{STEP_OF_VARIANT.get(image, image)}"


def entrypoint(image: str) -> list[str]:
    (command,) = stages(image)[-1].all("ENTRYPOINT")
    return json.loads(command)


def lay_out(image: str, root: Path, context: Path = REPOSITORY) -> Path:
    """Copy the files of the last stage from the context to their image paths below `root`.

    Returns:
        `root`.
    """
    for origin, source, target in stages(image)[-1].copies():
        if origin:
            continue  # the files come from another build stage
        final = root / target.lstrip("/")
        final.parent.mkdir(parents=True, exist_ok=True)
        if (context / source).is_dir():
            shutil.copytree(context / source, final, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(context / source, final)
    return root
