"""The descriptions of a recommender that people accepted: what the rounds of a store learn and serve by.

Joins `evergreen recommender`, which accepts a file, to extraction, where a description enters a run. Versions are
`<store>/recommender/<n>.json`, numbered from 1, with who accepted which, when and why in
`<store>/recommender/journal.jsonl`. A version counts from its line in the journal on: a file without one was left by an
accept that was killed, and the next accept overwrites it. Reading a person's file is left to others.
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

JOURNAL = "journal.jsonl"


@dataclass(frozen=True, kw_only=True)
class AcceptedRecommender:
    """One line of the journal."""

    version: int
    time: str
    """ISO 8601 UTC."""
    who: str
    reason: str
    name: str
    """The recommender's."""
    digest: str
    """`Recommender.digest`, which is the SHA-256 of the version's bytes."""


def recommenders_folder(store: Path) -> Path:
    """The folder of the versions."""
    return store / "recommender"


def read_accepted(store: Path) -> list[AcceptedRecommender]:
    """Every accepted version, oldest first; empty where nobody accepted one.

    Raises:
        ContractError: a line of the journal is corrupt; names the file and the line.
    """
    return read_records(recommenders_folder(store) / JOURNAL, AcceptedRecommender, name="an accepted recommender")


def accepted(store: Path, reference: str) -> Recommender:
    """The accepted description that `reference` names.

    The reference is `current`, the newest; or a version's number; or its digest, of which 8 digits are enough; or
    another store, an absolute path or a file:// URI, whose newest it is.

    Raises:
        ContractError: nobody accepted such a version, or its file is absent or was changed.
    """
    if reference.startswith(("/", "file://")):
        store, reference = local_path(reference), CURRENT
    lines = read_accepted(store)
    if not lines:
        raise ContractError(
            f"{recommenders_folder(store)} holds no recommender: describe yours in a file and accept it with "
            f"`evergreen recommender accept FILE --store {store}`"
        )
    found = lines
    if reference != CURRENT:
        is_digest = len(reference) >= 8
        found = [e for e in lines if reference == str(e.version) or (is_digest and e.digest.startswith(reference))]
    if not found:
        raise ContractError(
            f"recommender is {reference!r}, expected {CURRENT}, the number of an accepted version (1 to "
            f"{lines[-1].version}) or 8 digits of its digest at least"
        )
    return read_version(store, found[-1])


def check_run(store: Path, *, reference: str, settings: str) -> Recommender:
    """Return the description by which a run with these two parameters would work, checked.

    Raises:
        ContractError: There is no such description, or a setting is wrong.
    """
    recommender = accepted(store, reference).with_settings(parse_settings(settings))
    check_settings(recommender)
    return recommender


def served_recommender(store: Path) -> Recommender | None:
    """That of the live model; where nothing is live, the newest accepted one; None where there is neither.

    Raises:
        ContractError: the live model's manifest, or the accepted version, is absent or corrupt.
    """
    live = current(store)
    if live is not None:
        return stored_model(store, live.model_id, role="live model").recommender
    return accepted(store, CURRENT) if read_accepted(store) else None


def logged_recommender(store: Path) -> Recommender | None:
    """The newest accepted one, with all columns that its records may hold; None where there is none.

    Beside its own columns these are the live model's and those of every version that was accepted before under the same
    name: clients learn of a change one after another. Where the live model has another name, its rows are in the log.

    Raises:
        ContractError: as `served_recommender`.
    """
    served, versions = served_recommender(store), [read_version(store, line) for line in read_accepted(store)[::-1]]
    if served is None or not versions or versions[0].name != served.name:
        return served
    features = versions[0].features
    for other in (served, *versions[1:]):
        if other.name == served.name:
            features = features.joined(other.features)
    return replace(versions[0], features=features)


def recommender_at(path: Path) -> Recommender:
    """The description at `path`: that of a model store (`served_recommender`), or one that was accepted, as a file.

    Who has no store at hand takes a copy of `<store>/recommender/<n>.json`.

    Raises:
        ContractError: there is none, or it is corrupt.
    """
    if path.is_dir():
        if (found := served_recommender(path)) is None:
            raise ContractError(f"model store {path} holds no recommender, expected one that was accepted")
        return found
    if not path.is_file():
        raise ContractError(f"{path} does not exist, expected a model store or an accepted recommender's file")
    return Recommender.loads(path.read_bytes(), source=str(path))


def served_name(store: Path) -> str | None:
    """The name of the recommender that the store serves or is about to; None where it knows of no recommender yet.

    Raises:
        ContractError: as `served_recommender`.
    """
    lines, accepts = read_entries(store), read_accepted(store)
    if lines:
        return stored_model(store, lines[-1].model_id, role="released model").recommender.name
    return accepts[-1].name if accepts else None


def read_version(store: Path, line: AcceptedRecommender) -> Recommender:
    """The description that a line of the journal accepted.

    Raises:
        ContractError: its file is absent or was changed.
    """
    path = _path(store, line.version)
    content = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(content).hexdigest() != line.digest:
        raise ContractError(f"recommender {path} is absent or was changed in place since it was accepted")
    return Recommender.loads(content, source=str(path))


def accept(
    store: Path, recommender: Recommender, *, who: str, why: str, now: datetime, replaces_other: bool = False
) -> int:
    """Make `recommender` the store's newest version, all of it or nothing, and return its number.

    Args:
        store: The model store.
        recommender: What people described.
        who: Who accepts it.
        why: Why.
        now: Time of the line in the journal.
        replaces_other: Whether it may be another recommender than the one that uses the store.

    Raises:
        ContractError: No reason is given, the newest version says the same, or the store is in use by another
            recommender: one of another name, or without a column of this one's.
    """
    if not why.strip():
        raise ContractError("reason is empty, expected why this recommender is accepted")
    lines = read_accepted(store)
    if lines and lines[-1].digest == recommender.digest:
        raise ContractError(f"version {lines[-1].version} of the recommender says the same: nothing to accept")
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
    append_record(recommenders_folder(store) / JOURNAL, line)
    return version


def _expect_same(store: Path, line: AcceptedRecommender, recommender: Recommender) -> None:
    """Refuses another recommender than the one of the journal's line."""
    before = read_version(store, line)
    if before.name != recommender.name:
        difference = f"the file names its recommender {recommender.name!r}, expected {before.name!r}"
    elif set(before.features.names).isdisjoint(recommender.features.names):
        difference = (
            f"the file has none of the features of {before.name!r} ({', '.join(before.features.names[:5])}, ...), "
            "expected one at least"
        )
    else:
        return
    raise ContractError(
        f"{difference}: {store} is in use by version {line.version} of {before.name!r}. Give another recommender a "
        f"store of its own (--store), or replace {before.name!r} on purpose by --replace, and train the next model "
        "by `evergreen run --from-scratch`"
    )


def _path(store: Path, version: int) -> Path:
    return recommenders_folder(store) / f"{version}.json"
