"""Make an earlier version live again, on every server and in the journal.

The command is `python -m controller.rollback --store S --reason "..."`, or `evergreen release
rollback`. By default, the target is the version that the live version replaced. If a change is in
progress, the default target is the version that is live during the change. A rollback supersedes
every request that is not done yet. Only the target version stays loaded. Newer versions stay on
disk, and a later release gets a higher number than all of them. A version that is no longer in the
repository is restored from the model registry. A rollback succeeds only if every server responds.
To leave out a server that is gone permanently, pass the other servers with `--triton-urls`.
"""

import argparse
import logging
from dataclasses import replace

from controller.deployment_target import TargetSettings, add_target_flags, change_reason, target_of
from controller.reconcile import carry_out
from controller.waiting import add_waiting_flag, ask
from evergreen.contracts.requests import ROLLBACK, ServingRequest
from evergreen.registry import promotion_journal
from evergreen.registry.promotion_journal import Promotion
from evergreen.registry.requests import new_request
from evergreen.runtime.exit_codes import exits_with_code
from evergreen.runtime.flags import CommandParser

logger = logging.getLogger(__name__)


def rollback(
    settings: TargetSettings,
    *,
    to_version: int | None = None,
    reason: str,
    of: Promotion | None = None,
) -> Promotion:
    """Make an earlier version live, and return the journal entry of the live version.

    Args:
        settings: Deployment target.
        to_version: Version to make live. None = the version that the live version replaced.
        reason: Reason for the journal.
        of: Journal entry of the version to roll back. Only the controller passes this argument.
            That version's model is then blocked from automatic releases.

    Raises:
        Refused: the version of the journal entry `of` is no longer live.
        ContractError: the version does not exist, its graph is corrupt, or no copy of it is left.
        TemporaryError: a server does not answer, or nobody carried out the request. The live
            version is unchanged.
        PermanentError: a server rejected the version or answered wrongly. The live version is
            unchanged.
    """
    request = rollback_request(settings, to_version=to_version, reason=reason)
    request = replace(request, replaces=of.version if of else None)
    state = carry_out(settings, request)
    line = state.recorded or promotion_journal.current(settings.store)
    assert line is not None
    return line


def rollback_request(
    settings: TargetSettings, *, to_version: int | None, reason: str
) -> ServingRequest:
    """Return a person's request for a rollback."""
    request = new_request(
        ROLLBACK,
        who=settings.who,
        reason=reason,
        now=settings.clock(),
        seconds=settings.timeouts.deadline_seconds,
    )
    return replace(request, to_version=to_version)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command."""
    parser = CommandParser(prog="evergreen release rollback", description=__doc__)
    add_target_flags(parser)
    parser.add_argument(
        "--to", type=int, help="version to serve; default: the one that the live version replaced"
    )
    parser.add_argument(
        "--reason", type=change_reason, required=True, help="reason for the journal"
    )
    add_waiting_flag(parser)
    return parser


@exits_with_code
def main(argv: list[str] | None = None) -> int:
    """Roll back. After a failure, the live version is unchanged."""
    arguments = build_parser().parse_args(argv)
    settings = target_of(arguments)
    request = rollback_request(settings, to_version=arguments.to, reason=arguments.reason)
    state = ask(settings, request, waits=arguments.wait)
    if state is None:
        return 0
    if (entry := state.recorded) is not None:
        print(f"version {entry.version} is live again (was {entry.previous_version})")
    else:
        live = promotion_journal.current(settings.store)
        print(f"version {live.version if live else None} is live: the change was withdrawn")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
