"""References from one manifest to another.

A reference is a URI with a hash, which the reader verifies.
"""

import hashlib
from pathlib import Path
from typing import TypeVar

from evergreen.contracts.manifests import Manifest, Reference, read_content
from evergreen.runtime.errors import ContractError
from evergreen.storage.uris import local_path

M = TypeVar("M", bound=Manifest)


def keep(manifest: Manifest, path: Path) -> Reference:
    """Write the manifest to `path`, where later steps find it, and return the reference to it."""
    manifest.write(path)
    return refer(path)


def refer(path: Path) -> Reference:
    """Return the reference to the manifest at an existing path.

    Raises:
        ContractError: The file cannot be read.
    """
    return Reference(
        uri=path.absolute().as_uri(), sha256=hashlib.sha256(read_content(path)).hexdigest()
    )


def read_reference(reference: Reference | None, kind: type[M], *, source: str) -> M:
    """Return the manifest that a reference names.

    Args:
        reference: Reference. The reference is None in a manifest that was not written by a step of
            the pipeline.
        kind: Class of the manifest.
        source: Description of the manifest that contains the reference, for error messages.

    Raises:
        ContractError: There is no reference, or the file is absent, was changed, or is not a
            manifest of that kind.
    """
    if reference is None:
        raise ContractError(
            f"{source} has no reference to a {kind.__name__} manifest, expected the reference to "
            "the manifest of the same run"
        )
    path = local_path(reference.uri)
    content = read_content(path)
    if (found := hashlib.sha256(content).hexdigest()) != reference.sha256:
        raise ContractError(
            f"{path} has sha256 {found}, expected {reference.sha256} as {source} says: it was "
            "changed"
        )
    return kind.loads(content, source=str(path))
