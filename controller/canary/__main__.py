"""Run a canary command: `python -m controller.canary start|status|advance|abort`.

The running controller grows the canary, releases it or ends it by itself. These commands are for
people.
"""

import argparse
import json
from dataclasses import asdict

from controller.canary import steps
from controller.canary.rules import add_evidence_flags, policy_of
from controller.canary.steps import CanarySettings, canary_request
from controller.deployment_target import add_target_flags, change_reason, target_of
from controller.promote import as_served_now
from controller.release import candidate_request
from controller.waiting import add_waiting_flag, ask
from evergreen.contracts.checks import Check
from evergreen.contracts.requests import ABORT, ADVANCE, CANARY
from evergreen.registry.models import evaluated_model
from evergreen.runtime.exit_codes import exits_with_code
from evergreen.runtime.flags import CommandParser
from evergreen.runtime.terminal import TableColumn, add_listing_flags, print_table
from evergreen.serving.canary_policy import FIRST_SHARE
from evergreen.serving.servers import parse_urls
from evergreen.storage.uris import open_objects

_SUMMARIES = {
    "start": "load an evaluated model beside the live model, and send traffic to it",
    "status": "evaluate the canary without changing anything",
    "advance": "give the canary its next share of users, or release the canary, without a test",
    "abort": "return all traffic to the live version, once the controller's current move has ended",
}


def build_parser() -> argparse.ArgumentParser:
    """Build the parser with its subcommands."""
    parser = CommandParser(prog="evergreen release canary", description=steps.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, summary in _SUMMARIES.items():
        command = commands.add_parser(name, help=summary)
        add_target_flags(command)
        if name == "start":
            command.add_argument("--model-id", required=True, help="id of the stored model")
            command.add_argument(
                "--shadow-only", action="store_true", help="score shadow traffic without serving"
            )
            add_waiting_flag(command)
            continue
        add_listing_flags(command)
        command.add_argument(
            "--metrics-urls",
            default="",
            help="host:port or dns:///name:port of every server's metrics",
        )
        add_evidence_flags(command)
        if name in ("advance", "abort"):
            add_waiting_flag(command)
            command.add_argument(
                "--reason", type=change_reason, required=True, help="reason for the journal"
            )
    return parser


@exits_with_code
def main(argv: list[str] | None = None) -> int:
    """Run one command. After a failure, the live version is unchanged."""
    arguments = build_parser().parse_args(argv)
    target = target_of(arguments)
    if arguments.command == "start":
        return _start(arguments)
    settings = CanarySettings(
        target=target,
        evidence=tuple(open_objects(uri) for uri in (arguments.archive, arguments.lake) if uri),
        metrics=parse_urls(arguments.metrics_urls),
        policy=policy_of(arguments),
    )
    if arguments.command == "status":
        _print_step(steps.status(settings), arguments)
    elif not arguments.wait:
        kind = ADVANCE if arguments.command == "advance" else ABORT
        ask(target, canary_request(settings, kind, arguments.reason), waits=False)
    elif arguments.command == "advance":
        _print_step(steps.advance(settings, arguments.reason), arguments)
    else:
        _print_step(steps.abort(settings, arguments.reason), arguments)
    return 0


def _start(arguments: argparse.Namespace) -> int:
    target = target_of(arguments)
    candidate = evaluated_model(target.store, arguments.model_id)
    settings = as_served_now(target.serving(candidate[0]))
    share = 0.0 if arguments.shadow_only else FIRST_SHARE
    request = candidate_request(CANARY, candidate, settings, share=share)
    if (state := ask(settings, request, waits=arguments.wait)) is not None:
        assert state.result is not None
        print(f"{state.result.reason}, model {arguments.model_id}")
    return 0


def _print_step(step: steps.Step, arguments: argparse.Namespace) -> None:
    """Print the canary's state and its checks as a table, or all fields as JSON."""
    if arguments.json:
        known = {name: value for name, value in asdict(step).items() if value is not None}
        print(json.dumps(known), flush=True)
        return
    version = "" if step.version is None else f"version {step.version}: "
    share = "" if step.share is None else f", {step.share:.0%} of the traffic"
    print(f"{version}{step.action}{share}: {step.reason}", flush=True)
    if step.decision is not None and step.decision.checks:
        print_table(_CHECKS, map(_cells, step.decision.checks), wide=arguments.wide)


_CHECKS = (
    TableColumn(name="check", is_flexible=True),
    TableColumn(name="value", is_number=True),
    TableColumn(name="limit", is_flexible=True),
    TableColumn(name="result"),
)


def _cells(check: Check) -> tuple[str | None, ...]:
    value = None if check.value is None else f"{check.value:.4g}"
    return (check.name, value, check.limit_text, check.result)


if __name__ == "__main__":
    raise SystemExit(main())
