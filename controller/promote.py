"""Release a stored model although the gate refused it or its verdict is stale.

The command is `python -m controller.promote --store S --model-id M --override REASON`, or
`evergreen release promote`. This command overrides only the gate's decision. The command builds the
graph, and checks its parity with the rows and scores that evaluation stored. All other checks of a
release run too.
"""

import argparse
import sys
from dataclasses import fields

from controller.deployment_target import TargetSettings, add_target_flags, change_reason, target_of
from controller.release import ReleaseSettings, candidate_request
from controller.waiting import add_waiting_flag, ask
from evergreen.contracts.requests import RELEASE
from evergreen.registry.models import evaluated_model, read_release, read_serving_target
from evergreen.registry.promotion_journal import blocked_models
from evergreen.runtime.exit_codes import exits_with_code
from evergreen.runtime.flags import CommandParser
from evergreen.runtime.plain_text import show
from evergreen.serving.repository.triton_config import ServingOptions, read_options


def as_served_now(settings: TargetSettings) -> ReleaseSettings:
    """Return release settings with the serving options of the live version."""
    serving_target = read_serving_target(settings.store)
    config = settings.open_repository().read_config()
    if config is not None:
        options = read_options(config)
    else:
        options = (
            ServingOptions(server=serving_target.server) if serving_target else ServingOptions()
        )
    return ReleaseSettings(
        **{each.name: getattr(settings, each.name) for each in fields(TargetSettings)},
        options=options,
    )


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command."""
    parser = CommandParser(prog="evergreen release promote", description=__doc__)
    add_target_flags(parser)
    parser.add_argument("--model-id", required=True, help="id of the stored model")
    parser.add_argument(
        "--override",
        type=change_reason,
        required=True,
        metavar="REASON",
        help="reason for the journal",
    )
    add_waiting_flag(parser)
    return parser


@exits_with_code
def main(argv: list[str] | None = None) -> int:
    """Promote the model. After a failure, the live version is unchanged."""
    arguments = build_parser().parse_args(argv)
    target = target_of(arguments)
    candidate = evaluated_model(target.store, arguments.model_id)
    settings = as_served_now(target.serving(candidate[0]))
    if line := blocked_models(target.store).get(arguments.model_id):
        show(
            f"model {arguments.model_id} was rolled back from version {line.previous_version} at "
            f"{line.time} by {line.who or 'unknown'} ({line.reason}): --override releases it again",
            file=sys.stderr,
        )
    request = candidate_request(RELEASE, candidate, settings, override=arguments.override)
    if (state := ask(settings, request, waits=arguments.wait)) is None:
        return 0
    assert state.result is not None
    assert state.result.version is not None
    done = read_release(settings.store, state.result.version)
    print(f"version {done.version} is live, model {done.model_id} (was {done.previous_version})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
