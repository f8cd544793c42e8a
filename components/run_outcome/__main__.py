"""The exit handler as a plain command."""

import argparse
import logging
from collections.abc import Sequence

from components.run_outcome.outcome import record
from components.runtime.exit_codes import exits_with_code


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = argparse.ArgumentParser(prog="python -m components.run_outcome", description=__doc__)
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--store", required=True, help="folder of the model store")
    parser.add_argument("--trigger-id", default="", help="retrain request that the run answers; empty = none")
    parser.add_argument("--trigger-reason", default="", help="why the run was started")
    parser.add_argument("--kfp-state", required=True, help="the run's final state in KFP")
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Records the outcome, notifies the webhook that the environment names, and prints it."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    arguments = build_parser().parse_args(argv)
    print(record(**vars(arguments)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
