"""Build and push the project's images with the installed container engine, for `make images`.

`pipelines.images` lists the images. The content of each image is defined by its Dockerfile.
Building needs git, and docker or podman. No Python package is needed, because a build machine has
none of the project's environments.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import ContractError, PermanentError
from evergreen.runtime.exit_codes import exits_with_code
from evergreen.runtime.flags import CommandParser
from pipelines.images import DOCKERFILES, STEP_OF_VARIANT, image_reference

_REPOSITORY = Path(__file__).resolve().parents[1]
DIGESTS = _REPOSITORY / "build" / "images.txt"
"""File that lists the digest of each pushed image, one per line. Signatures use digests, because a
tag may move."""
INDEXES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")
"""Variables that direct pip to other package indexes. Only the images that install the project's
own lock files get these indexes. NVIDIA's images install a single package."""
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags."""
    parser = CommandParser(prog="python -m tools.build_images", description=__doc__)
    parser.add_argument(
        "images",
        nargs="*",
        metavar="IMAGE",
        help=f"default: all of {', '.join(sorted(DOCKERFILES))}",
    )
    parser.add_argument("--registry", default="", help="prefix of the images; empty = local names")
    parser.add_argument("--tag", default="", help="tag of the images (default: the git revision)")
    parser.add_argument(
        "--revision",
        default="",
        help="revision, written to a label of the images (default: from git)",
    )
    parser.add_argument(
        "--source",
        default="unknown",
        help="address of the repository, written to a label of the images",
    )
    parser.add_argument(
        "--dirty", action="store_true", help="also build uncommitted changes, and mark the tag"
    )
    parser.add_argument(
        "--push", action="store_true", help=f"push too, and write their digests to {DIGESTS.name}"
    )
    parser.add_argument("--engine", choices=("docker", "podman"), default="docker")
    parser.add_argument(
        "--dry-run", action="store_true", help="only print the commands, quoted for a shell"
    )
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Build and push the requested images, and print their names.

    Raises:
        ContractError: a flag is wrong, or some files are not committed.
        PermanentError: the engine is absent, or a build failed.
    """
    arguments = build_parser().parse_args(argv)
    names = _chosen_images(arguments.images)
    revision = arguments.revision or _git_revision(arguments.dirty)
    tag = arguments.tag or revision
    if not _TAG.fullmatch(tag) or tag == "latest":
        raise ContractError(
            f"--tag is {tag!r}, expected an immutable tag of letters, digits, _ . -"
        )
    if arguments.push and not arguments.registry:
        raise ContractError(
            "--push is given without --registry, expected --registry with the target of the push"
        )
    engine = arguments.engine
    # Podman would resolve a name without a registry to an image in any registry, and tag that
    # image.
    registry = arguments.registry or ("localhost" if engine == "podman" else "")
    references = {name: image_reference(name, registry=registry, tag=tag) for name in names}
    commands = [
        (
            build_command(
                engine, name, references[name], tag=tag, revision=revision, source=arguments.source
            ),
            name,
        )
        for name in names
    ]
    if arguments.push:
        commands += [(_push_command(engine, name, references[name]), name) for name in names]
    if arguments.dry_run:
        print("\n".join(shlex.join(command) for command, _ in commands))
        return 0
    DIGESTS.parent.mkdir(exist_ok=True)
    for command, name in commands:
        _run_command(command, name)
    if arguments.push:
        _write_digests(engine, references, DIGESTS)
    print("\n".join(references.values()))
    return 0


def build_command(
    engine: str, name: str, reference: str, *, tag: str, revision: str, source: str
) -> list[str]:
    """Return the engine's command that builds image `name` in the repository's root.

    If the environment names another package index (`INDEXES`), wheels come from there. If a
    `--build-arg` has no value, the engine reads the value from the environment. Therefore no file
    and no log of this program contains the address of the index.
    """
    facts = {"VERSION": tag, "REVISION": revision, "SOURCE": source}
    command = [engine, "build", "--file", DOCKERFILES[name], "--tag", reference]
    for key, value in facts.items():
        command += ["--build-arg", f"{key}={value}"]
    if name not in STEP_OF_VARIANT:
        command += [word for key in INDEXES if key in os.environ for word in ("--build-arg", key)]
    return [*command, "."]


def _push_command(engine: str, name: str, reference: str) -> list[str]:
    """Return the engine's command that pushes image `name`.

    Podman writes to `_digest_file` the digest that the registry computed.
    """
    noting = ["--digestfile", str(_digest_file(name))] if engine == "podman" else []
    return [engine, "push", *noting, reference]


def _git_revision(dirty: bool) -> str:
    """Return the full SHA of the checked-out commit.

    The revision ends with `-dirty` if files differ from the commit and the argument `dirty` allows
    such files.

    Raises:
        ContractError: there is no git checkout, or files differ from the commit.
    """
    revision = _git("rev-parse", "HEAD")
    changed = _git("status", "--porcelain").splitlines()
    if changed and not dirty:
        raise ContractError(
            f"{len(changed)} files are not committed, such as {changed[0].split(maxsplit=1)[1]}: a "
            "tag by revision would not identify the content of the image. Commit them, or set "
            "DIRTY=1 (--dirty)"
        )
    return f"{revision}-dirty" if changed else revision


def _write_digests(engine: str, references: Mapping[str, str], path: Path) -> None:
    """Write the digest of each pushed image, one `repository@sha256:...` per line.

    Podman compresses an image again when it pushes the image. For Podman, `RepoDigests` are
    therefore digests of the local image, and the registry's digest is read from the file that the
    push wrote.

    Raises:
        PermanentError: the engine has no digest of an image, so the image was not pushed.
    """
    lines = []
    for name, reference in references.items():
        if engine == "podman":
            lines.append(f"{reference.rsplit(':', 1)[0]}@{_digest_file(name).read_text().strip()}")
            continue
        command = [engine, "image", "inspect", "--format", "{{json .RepoDigests}}", reference]
        done = subprocess.run(command, capture_output=True, text=True, cwd=_REPOSITORY)
        repository = reference.rsplit(":", 1)[0]
        known = json.loads(done.stdout.strip() or "[]") or [] if done.returncode == 0 else []
        digests = [digest for digest in known if digest.partition("@")[0] == repository]
        if not digests:
            raise PermanentError(
                f"{engine} has no digest of {reference}: {done.stderr.strip() or known}"
            )
        lines.append(digests[0])
    write_whole(path, "".join(f"{line}\n" for line in lines))


def _digest_file(name: str) -> Path:
    return DIGESTS.with_name(f"{name}.digest")


def _chosen_images(names: Sequence[str]) -> list[str]:
    """Return the requested images, or all if none is named."""
    if unknown := sorted(set(names) - DOCKERFILES.keys()):
        raise ContractError(
            f"image {', '.join(unknown)} is unknown, expected some of "
            f"{', '.join(sorted(DOCKERFILES))}"
        )
    return list(names) or sorted(DOCKERFILES)


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True, cwd=_REPOSITORY)
    except FileNotFoundError as error:
        raise ContractError("git is not on PATH, expected --revision and --tag") from error
    if done.returncode:
        raise ContractError(f"git {words[0]} failed, expected --revision: {done.stderr.strip()}")
    return done.stdout.strip()


def _run_command(command: Sequence[str], name: str) -> None:
    print(shlex.join(command), flush=True)
    try:
        code = subprocess.run(command, cwd=_REPOSITORY).returncode
    except FileNotFoundError as error:
        raise PermanentError(f"{command[0]} is not on PATH") from error
    if code:
        raise PermanentError(f"{shlex.join(command[:2])} of {name} ended with code {code}")


if __name__ == "__main__":
    raise SystemExit(main())
