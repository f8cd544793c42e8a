"""Append a request for a command, and wait for the result if the caller wants it."""

import argparse
import sys

from controller.deployment_target import TargetSettings
from controller.reconcile import carry_out
from evergreen.contracts.requests import ServingRequest
from evergreen.registry.requests import RequestState, append_request


def add_waiting_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag `--no-wait` of a command that changes what is served."""
    parser.add_argument(
        "--no-wait",
        dest="wait",
        action="store_false",
        help="only append the request, which a running controller carries out",
    )


def ask(
    settings: TargetSettings,
    request: ServingRequest,
    *,
    waits: bool,
) -> RequestState | None:
    """Append the request, and return its state after it was done.

    Returns None at once if `waits` is False. The progress is printed to the standard error.

    Raises:
        Refused, ContractError, PermanentError, TemporaryError: as in `carry_out`.
    """
    if not waits:
        append_request(settings.store, request)
        print(f"request {request.request} is in the journal until {request.deadline}")
        return None
    return carry_out(settings, request, report=lambda text: print(text, file=sys.stderr))
