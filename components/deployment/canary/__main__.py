"""The canary's command line: `python -m components.deployment.canary start|step|watch|advance|abort|status`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, fields

from components.deployment.canary import steps
from components.deployment.canary.policy import CanaryPolicy
from components.deployment.canary.start import FIRST_SHARE, SHADOW_SHARE, start
from components.deployment.command_line import add_site_flags, change_reason, site_of
from components.deployment.promote import as_served_now
from components.deployment.servers import parse_urls
from components.runtime.exit_codes import exits_with_code
from components.storage.locations import open_objects
from components.storage.uris import typed_uri
from components.store.models import judged_model

_HELP = {
    "shares": "its share at each stage, comma-separated",
    "min_pairs": "rows scored by both at the first look; each further look has twice as many",
    "max_looks": "looks at one stage",
    "alpha": "highest probability of aborting a model that is as good",
    "growth_alpha": "highest probability, per stage, of growing one that is worse by a margin",
    "auc_margin": "loss of AUC that is tolerated",
    "log_loss_margin": "loss in nats per row that is tolerated",
    "min_requests": "requests of each arm before errors and latency are judged; latency aborts after ten times as many",
    "error_margin": "rate of failures beyond stable's that is tolerated",
    "error_alpha": "highest probability of aborting by errors a model that fails no more than that",
    "max_latency_ratio": "highest mean latency, as a multiple of stable's",
}


def build_parser() -> argparse.ArgumentParser:
    """The commands and their flags."""
    parser = argparse.ArgumentParser(prog="evergreen canary", description=steps.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    start = _command(commands, "start", "load a judged model beside the live one and send it traffic")
    start.add_argument("--model-id", required=True, help="the stored model")
    start.add_argument("--shadow-only", action="store_true", help="it scores and answers nobody")
    start.add_argument("--first-share", type=float, default=FIRST_SHARE, help="share of keys (default: %(default)s)")
    start.add_argument(
        "--shadow-share", type=float, default=SHADOW_SHARE, help="share of requests both score (default: %(default)s)"
    )
    for name, summary in (
        ("step", "evaluate once, and do what follows"),
        ("watch", "step until there is no canary any more"),
        ("status", "say what the next step would find"),
        ("advance", "take it to the next share, or to all, on a person's word"),
    ):
        command = _command(commands, name, summary)
        command.add_argument("--archive", type=typed_uri, help="the monitor's archive, folder or its URI")
        command.add_argument("--lake", type=typed_uri, help="the lake: folder, its URI, or gs://")
        for rule in fields(CanaryPolicy):
            flag, default = f"--{rule.name.replace('_', '-')}", rule.default
            if rule.name == "shares":
                command.add_argument(flag, type=_shares, default=default, help=_HELP[rule.name])
            else:
                command.add_argument(
                    flag, type=type(default), default=default, help=_HELP[rule.name] + " (default: %(default)s)"
                )
        if name == "advance":
            command.add_argument("--reason", type=change_reason, required=True, help="why, for the journal")
        if name == "watch":
            command.add_argument("--interval-seconds", type=float, default=30.0, help="between two steps")
    abort = _command(commands, "abort", "take the canary's traffic back at once")
    abort.add_argument("--reason", type=change_reason, required=True, help="why, for the journal")
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=summary)
    add_site_flags(command)
    command.add_argument(
        "--metrics-urls", default="", help="host:metrics_port or dns:///name:metrics_port of every server"
    )
    return command


def _shares(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


@exits_with_code
def main(argv: list[str] | None = None) -> int:
    """Runs one command; where it fails, what was live is live."""
    arguments = build_parser().parse_args(argv)
    print(_start(arguments) if arguments.command == "start" else _run(arguments))
    return 0


def _start(arguments: argparse.Namespace) -> str:
    site = site_of(arguments)
    done = start(
        *judged_model(site.store, arguments.model_id),
        as_served_now(site),
        shadow_only=arguments.shadow_only,
        first_share=arguments.first_share,
        shadow_share=arguments.shadow_share,
        metrics=parse_urls(arguments.metrics_urls),
    )
    return f"version {done.version} is the canary, model {done.model_id}"


def _run(arguments: argparse.Namespace) -> str:
    settings = _settings(arguments)
    if arguments.command == "abort":
        _print_step(steps.abort(settings, arguments.reason))
        done = steps.watch(settings, interval_seconds=1.0)
    elif arguments.command == "watch":
        done = steps.watch(settings, interval_seconds=arguments.interval_seconds, report=_print_step)
    elif arguments.command == "advance":
        done = steps.advance(settings, arguments.reason)
    else:
        done = steps.step(settings) if arguments.command == "step" else steps.status(settings)
    return _as_json(done)


def _settings(arguments: argparse.Namespace) -> steps.CanarySettings:
    places = [getattr(arguments, name, None) for name in ("archive", "lake")]
    rules = {rule.name: getattr(arguments, rule.name) for rule in fields(CanaryPolicy) if hasattr(arguments, rule.name)}
    return steps.CanarySettings(
        site=site_of(arguments),
        evidence=tuple(open_objects(uri) for uri in places if uri),
        metrics=parse_urls(arguments.metrics_urls),
        policy=CanaryPolicy(**rules),
    )


def _print_step(step: steps.Step) -> None:
    print(_as_json(step), flush=True)


def _as_json(step: steps.Step) -> str:
    """The step as one line of JSON."""
    return json.dumps({name: value for name, value in asdict(step).items() if value is not None})


if __name__ == "__main__":
    raise SystemExit(main())
