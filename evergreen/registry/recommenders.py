"""The accepted recommenders of a registry: versions of the file that describes what to train.

`evergreen data accept` accepts a new file, and extraction reads the accepted version for a run.
Accepted versions are stored as `<store>/recommender/<n>.json`, numbered from 1.
`<store>/recommender/journal.jsonl` records who accepted each version, when and why. A version
exists as soon as the journal has its line. If a file has no line in the journal, the command that
wrote the file was killed. The next `accept` overwrites this file.
"""

import hashlib
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from evergreen.config.reader import parse_settings
from evergreen.config.sections import check_settings
from evergreen.config.spec import Recommender
from evergreen.contracts.manifests import CURRENT
from evergreen.registry.models import stored_model
from evergreen.registry.promotion_journal import current, read_entries
from evergreen.runtime.durable import append_record, read_records, write_whole
from evergreen.runtime.errors import ContractError
from evergreen.storage.uris import local_path

_JOURNAL = "journal.jsonl"


@dataclass(frozen=True, kw_only=True)
class AcceptedRecommender:
    """One line of the journal."""

    version: int
    time: str
    """ISO 8601 UTC."""
    who: str
    reason: str
    name: str
    """Name of the recommender."""
    digest: str
    """SHA-256 of the version's file (`Recommender.digest`)."""


def _recommenders_folder(store: Path) -> Path:
    """Return the folder of the versions."""
    return store / "recommender"


def read_accepted(store: Path) -> list[AcceptedRecommender]:
    """Return all accepted versions, oldest first. The list is empty if no version was accepted.

    Raises:
        ContractError: a line of the journal is corrupt. The message names the file and the line.
    """
    return read_records(
        _recommenders_folder(store) / _JOURNAL, AcceptedRecommender, name="an accepted recommender"
    )


def accepted(store: Path, reference: str) -> Recommender:
    """Return the accepted recommender that `reference` names.

    Args:
        store: Folder of the model registry.
        reference: `current` (the newest version), the number of a version, or at least 8 digits of
            its digest. An absolute path or `file://` URI of another registry refers to the newest
            version in that registry.

    Raises:
        ContractError: the version does not exist, or its file is absent or was changed.
    """
    if reference.startswith(("/", "file://")):
        store, reference = local_path(reference), CURRENT
    lines = read_accepted(store)
    if not lines:
        raise ContractError(
            f"{_recommenders_folder(store)} holds no recommender: describe yours in a file and "
            f"accept it with `evergreen data accept FILE --store {store}`"
        )
    found = lines
    if reference != CURRENT:
        is_digest = len(reference) >= 8
        found = [
            e
            for e in lines
            if reference == str(e.version) or (is_digest and e.digest.startswith(reference))
        ]
    if not found:
        raise ContractError(
            f"recommender is {reference!r}, expected {CURRENT}, the number of an accepted version "
            f"(1 to {lines[-1].version}), or at least the first 8 digits of a version's digest"
        )
    return read_version(store, found[-1])


def check_run(store: Path, *, reference: str, settings: str) -> Recommender:
    """Check the settings of a run, and return the recommender that its parameters name.

    Raises:
        ContractError: the recommender does not exist, or a setting is wrong.
    """
    recommender = accepted(store, reference).with_settings(parse_settings(settings))
    check_settings(recommender)
    return recommender


def _served_recommender(store: Path) -> Recommender | None:
    """Return the recommender of the live model.

    If no model is live, the newest accepted recommender is returned. Returns None if there is no
    live model and no accepted recommender.

    Raises:
        ContractError: the live model's manifest, or the accepted version, is absent or corrupt.
    """
    live = current(store)
    if live is not None:
        return stored_model(store, live.model_id, role="live model").recommender
    return accepted(store, CURRENT) if read_accepted(store) else None


def logged_recommender(store: Path) -> Recommender | None:
    """Return the newest accepted recommender, with all columns that log records may contain.

    The columns of the live model and of all earlier versions of the same name are included, because
    clients adopt a change one after another. If the live model has another name, the log contains
    the rows of the live model. In this case, the recommender of the live model is returned. Returns
    None if there is no recommender.

    Raises:
        ContractError: see `_served_recommender`.
    """
    served, versions = (
        _served_recommender(store),
        [read_version(store, line) for line in read_accepted(store)[::-1]],
    )
    if served is None or not versions or versions[0].name != served.name:
        return served
    features = versions[0].features
    for other in (served, *versions[1:]):
        if other.name == served.name:
            features = features.joined(other.features)
    return replace(versions[0], features=features)


def recommender_at(path: Path) -> Recommender:
    """Return the recommender that is stored at `path`.

    Args:
        path: Folder of a model registry (see `_served_recommender`), or a copy of
            `<store>/recommender/<n>.json`.

    Raises:
        ContractError: no recommender is stored there, or it is corrupt.
    """
    if path.is_dir():
        if (found := _served_recommender(path)) is None:
            raise ContractError(
                f"model registry {path} holds no recommender, expected one that was accepted"
            )
        return found
    if not path.is_file():
        raise ContractError(
            f"{path} does not exist, expected a model registry or an accepted recommender's file"
        )
    return Recommender.loads(path.read_bytes(), source=str(path))


def served_name(store: Path) -> str | None:
    """Return the name of the recommender that is served or will be served next.

    Returns None if the registry has no recommender yet.

    Raises:
        ContractError: see `_served_recommender`.
    """
    lines, accepts = read_entries(store), read_accepted(store)
    if lines:
        return stored_model(store, lines[-1].model_id, role="released model").recommender.name
    return accepts[-1].name if accepts else None


def read_version(store: Path, line: AcceptedRecommender) -> Recommender:
    """Return the recommender that a line of the journal accepted.

    Raises:
        ContractError: the file of the version is absent or was changed.
    """
    path = _path(store, line.version)
    content = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(content).hexdigest() != line.digest:
        raise ContractError(
            f"recommender {path} is absent or was changed in place since it was accepted"
        )
    return Recommender.loads(content, source=str(path))


def accept(
    store: Path,
    recommender: Recommender,
    *,
    who: str,
    why: str,
    now: datetime,
    replaces_other: bool = False,
) -> int:
    """Store `recommender` as the newest version and return its number.

    The version is complete once its line is in the journal.

    Args:
        store: Folder of the model registry.
        recommender: Recommender to accept.
        who: Person who accepts the recommender.
        why: Reason.
        now: Time of the line in the journal.
        replaces_other: Whether the new version may replace a different recommender that uses the
            registry.

    Raises:
        ContractError: the reason is empty, the newest version is the same, or a different
            recommender uses the registry. Two recommenders differ if they have different names or
            no common feature.
    """
    if not why.strip():
        raise ContractError("reason is empty, expected why this recommender is accepted")
    lines = read_accepted(store)
    if lines and lines[-1].digest == recommender.digest:
        raise ContractError(
            f"version {lines[-1].version} of the recommender has the same content: nothing to "
            "accept"
        )
    if lines and not replaces_other:
        _expect_same(store, lines[-1], recommender)
    version = lines[-1].version + 1 if lines else 1
    write_whole(_path(store, version), recommender.dumps())
    line = AcceptedRecommender(
        version=version,
        time=now.isoformat(),
        who=who,
        reason=why,
        name=recommender.name,
        digest=recommender.digest,
    )
    append_record(_recommenders_folder(store) / _JOURNAL, line)
    return version


def _expect_same(store: Path, line: AcceptedRecommender, recommender: Recommender) -> None:
    """Raise ContractError if the recommender differs from the one in the journal line."""
    before = read_version(store, line)
    if before.name != recommender.name:
        difference = (
            f"the file names its recommender {recommender.name!r}, expected {before.name!r}"
        )
    elif set(before.features.names).isdisjoint(recommender.features.names):
        difference = (
            f"the file has none of the features of {before.name!r} "
            f"({', '.join(before.features.names[:5])}, ...), expected one at least"
        )
    else:
        return
    raise ContractError(
        f"{difference}: {store} is in use by version {line.version} of {before.name!r}. Give "
        f"another recommender a store of its own (--store), or replace {before.name!r} on purpose "
        "by --replace, and train the next model by `evergreen run --from-scratch`"
    )


def _path(store: Path, version: int) -> Path:
    return _recommenders_folder(store) / f"{version}.json"
