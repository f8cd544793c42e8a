"""Run a canary command: `python -m controller.canary start|step|watch|...`."""

import argparse
import json
from dataclasses import asdict, fields
from typing import Any

from controller.canary import steps
from controller.promote import as_served_now
from evergreen.registry.models import evaluated_model
from evergreen.runtime.errors import ContractError
from evergreen.runtime.exit_codes import exits_with_code
from evergreen.runtime.flags import CommandParser
from evergreen.serving import canary as serving_canary
from evergreen.serving.canary_policy import CanaryPolicy
from evergreen.serving.servers import parse_urls
from evergreen.serving.site import add_site_flags, change_reason, site_of
from evergreen.storage.uris import open_objects, typed_uri

MAX_INTERVAL_SECONDS = 3600.0
_SUMMARIES = {
    "start": "load an evaluated model beside the live one and send it traffic",
    "step": "evaluate the canary once, and grow, release or abort it",
    "watch": "repeat the step until there is no canary",
    "status": "evaluate the canary without changing anything",
    "advance": "give it the next share or release it, whatever the evidence is",
    "abort": "take all traffic from the canary at once",
}
_DEFAULTS: dict[str, Any] = {rule.name: rule.default for rule in fields(CanaryPolicy)}


def build_parser() -> argparse.ArgumentParser:
    """Build the parser with its subcommands."""
    parser = CommandParser(prog="evergreen release canary", description=steps.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, summary in _SUMMARIES.items():
        command = commands.add_parser(name, help=summary)
        add_site_flags(command)
        if name == "start":
            command.add_argument("--model-id", required=True, help="id of the stored model")
            command.add_argument(
                "--shadow-only", action="store_true", help="score shadow traffic without serving"
            )
            continue
        command.add_argument(
            "--metrics-urls",
            default="",
            help="host:port or dns:///name:port of every server's metrics",
        )
        command.add_argument(
            "--archive", type=typed_uri, help="the monitor's archive, folder or its URI"
        )
        command.add_argument("--lake", type=typed_uri, help="the lake: folder, its URI, or gs://")
        command.add_argument(
            "--rule",
            action="append",
            default=[],
            type=_rule,
            metavar="NAME=VALUE",
            help=f"value of a rule, may be repeated; defaults: {_DEFAULTS}",
        )
        if name in ("advance", "abort"):
            command.add_argument(
                "--reason", type=change_reason, required=True, help="reason for the journal"
            )
        if name == "watch":
            command.add_argument(
                "--interval-seconds", type=float, default=30.0, help="seconds between two steps"
            )
    return parser


def _rule(text: str) -> tuple[str, Any]:
    """Parse the name and the value of a rule of `CanaryPolicy`.

    >>> _rule("shares=0.1,0.5"), _rule("min_pairs=500")
    (('shares', (0.1, 0.5)), ('min_pairs', 500))
    """
    name, _, value = text.partition("=")
    if name not in _DEFAULTS:
        raise argparse.ArgumentTypeError(
            f"no rule is named {name!r}, expected one of {', '.join(_DEFAULTS)}"
        )
    if name == "shares":
        return name, tuple(float(part) for part in value.split(","))
    return name, type(_DEFAULTS[name])(value)


@exits_with_code
def main(argv: list[str] | None = None) -> int:
    """Run one command. After a failure the live version is unchanged."""
    arguments = build_parser().parse_args(argv)
    site = site_of(arguments)
    if arguments.command == "watch" and not 0 < arguments.interval_seconds <= MAX_INTERVAL_SECONDS:
        raise ContractError(
            f"interval is {arguments.interval_seconds} s, expected more than 0 and at most "
            f"{MAX_INTERVAL_SECONDS:g}"
        )
    if arguments.command == "start":
        evaluated = evaluated_model(site.store, arguments.model_id)
        share = 0.0 if arguments.shadow_only else serving_canary.FIRST_SHARE
        done = serving_canary.start(
            *evaluated, settings=as_served_now(site.serving(evaluated[0])), share=share
        )
        print(f"version {done.version} is the canary, model {done.model_id}")
        return 0
    settings = steps.CanarySettings(
        site=site,
        evidence=tuple(open_objects(uri) for uri in (arguments.archive, arguments.lake) if uri),
        metrics=parse_urls(arguments.metrics_urls),
        policy=CanaryPolicy(**dict(arguments.rule)),
    )
    if arguments.command == "abort":
        _print_step(steps.abort(settings, arguments.reason))
        _print_step(steps.watch(settings, interval_seconds=1.0))
    elif arguments.command == "watch":
        steps.watch(settings, interval_seconds=arguments.interval_seconds, report=_print_step)
    elif arguments.command == "advance":
        _print_step(steps.advance(settings, arguments.reason))
    else:
        _print_step(steps.step(settings) if arguments.command == "step" else steps.status(settings))
    return 0


def _print_step(step: serving_canary.Step) -> None:
    print(
        json.dumps({name: value for name, value in asdict(step).items() if value is not None}),
        flush=True,
    )


if __name__ == "__main__":
    raise SystemExit(main())
