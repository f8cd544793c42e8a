"""Rollback: an earlier version is live again, on every server and in the journal, with the reason.

`python -m controller.rollback --store S --reason "..."` (`evergreen rollback`). Without `--to` it is the
version that the live one replaced, or, where a deployment was interrupted, the live one itself: the interrupted one is
withdrawn first, and going back further takes another command. Only the named version stays loaded; the newer ones
stay on disk, and a later release gets a number above them all. A version that left the repository comes back from the
model store. Every server must answer; one that is gone for good is left out by naming the others with `--triton-urls`.
"""

import argparse
import logging
from dataclasses import replace
from pathlib import Path

from evergreen.contracts.manifests import Release
from evergreen.registry import promotion_journal
from evergreen.registry.models import read_release
from evergreen.registry.promotion_journal import Promotion
from evergreen.runtime.errors import ContractError, Refused
from evergreen.runtime.exit_codes import exits_with_code
from evergreen.runtime.flags import CommandParser
from evergreen.serving.site import Site, SiteSettings, add_site_flags, change_reason, opened, site_of
from evergreen.serving.switch import make_live

logger = logging.getLogger(__name__)


def rollback(
    settings: SiteSettings, *, to_version: int | None = None, reason: str, of: Promotion | None = None
) -> Promotion:
    """The journal's entry that made the version live; an older entry where withdrawing a killed deployment was enough.

    `to_version` None = see the module; `of` is the line that made the live version live, where nobody but the
    controller asks: its model is barred.

    Raises:
        Refused: another version than that of `of` is live by now.
        ContractError: there is no such version, its graph is damaged, or no copy of it is left.
        TemporaryError: a server does not answer, or a deployment is at work; what was live is live.
        PermanentError: a server refused the version or answered wrongly; what was live is live.
    """
    with opened(settings) as site:
        live = site.live
        if live is None:
            raise ContractError(f"model store {settings.store} has no release, expected one to roll back")
        if of is not None and live != of:
            raise Refused(f"version {live.version} is live since {live.time}, expected {of.version} since {of.time}")
        if site.recovered and of is None and to_version in (None, live.version):
            return live
        target = _target_release(site, live, to_version if to_version is not None else _replaced_by(site.store, live))
        line = site.entry(promotion_journal.ROLLBACK, target, reason=reason)
        line = replace(line, barred_model_id=of.model_id if of else None)
        line = make_live(site, target, line, options=site.repository.options_for(target.version))
        logger.info("rolled back from version %d to %d: %s", live.version, line.version, reason)
        return line


def _replaced_by(store: Path, live: Promotion) -> int:
    """The version before the live one when it was released: repeated rollbacks lead further back, not to and fro."""
    # From the journal: a damaged manifest of the live version must not keep anyone from leaving it.
    lines = promotion_journal.read_journal(store)
    version = next(line.previous_version for line in lines if line.version == live.version)
    if version is None:
        raise ContractError(f"version {live.version} is the first release, expected one with a previous version")
    return version


def _target_release(site: Site, live: Promotion, version: int) -> Release:
    if version == live.version:
        raise ContractError(f"version {version} is live already, expected another version")
    released = sorted({entry.version for entry in promotion_journal.read_journal(site.store)})
    if version not in released:
        raise ContractError(f"version {version} was never released, expected one of {released}")
    return read_release(site.store, version)


def build_parser() -> argparse.ArgumentParser:
    """The flags of a rollback."""
    parser = CommandParser(prog="evergreen rollback", description=__doc__)
    add_site_flags(parser)
    parser.add_argument("--to", type=int, help="version wanted; default: the one the live version replaced")
    parser.add_argument("--reason", type=change_reason, required=True, help="why, for the journal")
    return parser


@exits_with_code
def main(argv: list[str] | None = None) -> int:
    """Rolls back; where it fails, what was live is live."""
    arguments = build_parser().parse_args(argv)
    entry = rollback(site_of(arguments), to_version=arguments.to, reason=arguments.reason)
    if entry.action == promotion_journal.ROLLBACK and entry.reason == arguments.reason:
        print(f"version {entry.version} is live again (was {entry.previous_version})")
    else:
        print(f"version {entry.version} is live: the deployment that was interrupted has been withdrawn")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
