"""Run the deployment step from the command line: `python -m components.deployment --help`.

The step exports the graph, checks its parity, and appends a request to the journal of the model
registry. The controller carries out the request and records an answer. If no controller accepts the
request in time, the step withdraws the request and ends with code 3.

docs/reference/exit-codes.md lists the exit codes. Code 1 means that the model must not be released.
The reason may be that the gate rejected the model or that `rollout` is `none`. Other reasons are a
running canary, and a verdict whose champion is no longer live. Only a new run can help, because a
retry of the step gives the same result. A retry after code 0 gives the same result too, even if the
version was rolled back since. After codes 2 and 3, the previous live version is still live, and a
retry requests the release again. The retry is refused if somebody asked for a rollback since the
first request of the run.
"""

import argparse
import logging
import time
from contextlib import suppress
from dataclasses import fields
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from evergreen.config.release import (
    AUTO,
    CANARY,
    FULL,
    SHADOW,
    UNRELEASED,
    RolloutSettings,
    ServingSettings,
)
from evergreen.registry import promotion_journal, runs
from evergreen.registry.model_cards import card_path, read_card
from evergreen.runtime.durable import own_umask, write_whole
from evergreen.runtime.errors import ContractError, Refused, TemporaryError
from evergreen.runtime.exit_codes import exits_with_code
from evergreen.runtime.flags import CommandParser
from evergreen.runtime.plain_text import log_as_text
from evergreen.serving.repository.triton_config import DEVICES, SERVERS, ServingOptions

if TYPE_CHECKING:
    from evergreen.contracts.manifests import Verdict
    from evergreen.contracts.requests import ServingAnswer, ServingRequest

logger = logging.getLogger(__name__)

STEP = "deployment"
SERVES = {FULL: "serves", CANARY: "is a canary", SHADOW: "scores shadow traffic"}


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of this step without importing a heavy package."""
    parser = CommandParser(prog="python -m components.deployment", description=__doc__)
    parser.add_argument("--run", required=True, help="name of the pipeline run")
    parser.add_argument("--store", required=True, help="folder URI of the registry")
    parser.add_argument("--server", choices=SERVERS, default="python", help="backend in Triton")
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default="cpu",
        help="device of onnxruntime; a MIG slice is a gpu",
    )
    parser.add_argument(
        "--answer-seconds",
        type=float,
        default=900.0,
        help="seconds until a request that no controller accepts is withdrawn",
    )
    parser.add_argument("--who", default="", help="name for the journal; default: the run")
    parser.add_argument(
        "--trigger-id", default="", help="retrain request that this run answers; empty = none"
    )
    parser.add_argument(
        "--verdict",
        required=True,
        type=Path,
        help="Verdict manifest, which names the model and its held-out rows",
    )
    parser.add_argument("--html", type=Path, help="where the page of the model's card goes")
    parser.add_argument(
        "--output", required=True, type=Path, help="where the Release manifest goes"
    )
    return parser


@exits_with_code
def main(argv: list[str] | None = None) -> int:
    """Release the model as the module's docstring describes."""
    own_umask()
    arguments = build_parser().parse_args(argv)
    log_as_text()
    from evergreen.storage.uris import local_path

    store = local_path(arguments.store)
    with runs.step_note(store, arguments.run, STEP) as note:
        runs.forget_report(store, arguments.run, STEP)
        try:
            _deploy(arguments, note)
        except Refused as error:
            if arguments.html:
                from evergreen.reports.page import refusal_page

                write_whole(arguments.html, refusal_page(STEP, str(error)))
            raise
    return 0


def _deploy(arguments: argparse.Namespace, note: runs.StepNote) -> None:
    from evergreen.contracts import requests as kinds
    from evergreen.contracts.checks import PASS
    from evergreen.contracts.manifests import Model, RawDataset, Verdict
    from evergreen.registry.requests import expect_done, final_answer, open_requests, submit_request
    from evergreen.serving.canary_policy import FIRST_SHARE
    from evergreen.serving.prepare import prepare_request, remove_prepared
    from evergreen.storage.references import read_reference
    from evergreen.storage.uris import local_path

    verdict = Verdict.read(arguments.verdict)
    if not verdict.accepted:
        raise Refused(f"verdict is {verdict.decision}: {verdict.sentence}")
    source = str(arguments.verdict)
    model = read_reference(verdict.model, Model, source=source)
    raw = read_reference(verdict.raw_dataset, RawDataset, source=source)
    configured = raw.recommender.section("release", RolloutSettings)
    rollout = configured.rollout
    if rollout == UNRELEASED:
        note.facts = {"rollout": rollout}
        raise Refused(
            f"model {model.model_id} is stored and not released, because rollout is {rollout}; "
            f"{verdict.sentence}"
        )
    if rollout == FULL and verdict.decision != PASS:
        raise Refused(
            f"rollout is {FULL} and the verdict {verdict.decision}, expected a pass: "
            f"{verdict.sentence}"
        )
    store = local_path(arguments.store)
    if (earlier := final_answer(store, arguments.run, model.model_id)) is not None:
        # This is a retry, and the request was already answered. A person may have rolled the
        # version back since.
        logger.info("request %s of this run was answered already", earlier.id)
        result = expect_done(earlier)
        _report_release(
            arguments, note, verdict, store=store, request=earlier.request, result=result
        )
        return
    options = ServingOptions(
        server=arguments.server,
        device=arguments.device,
        **{each.name: getattr(configured, each.name) for each in fields(ServingSettings)},
    )
    if rollout == AUTO:
        # `auto` means `full` in two cases. The first version has no earlier version for a
        # comparison with a canary. The model of a retried step may already be live.
        live = promotion_journal.current(store)
        replaces = live is not None and live.model_id != model.model_id
        rollout = CANARY if replaces and verdict.decision != PASS else FULL
    request = prepare_request(
        kinds.RELEASE if rollout == FULL else kinds.CANARY,
        (model, verdict, raw),
        store=store,
        options=options,
        who=arguments.who or arguments.run,
        now=_now,
        seconds=arguments.answer_seconds,
        run=arguments.run,
        trigger_id=arguments.trigger_id or None,
        share={CANARY: FIRST_SHARE, SHADOW: 0.0}.get(rollout),
    )
    logger.info(
        "request %s was appended to the journal; the controller can accept it until %s",
        request.request,
        request.deadline,
    )
    try:
        result = submit_request(store, request, clock=_now, sleep=time.sleep, report=logger.info)
    finally:
        # An unreadable journal must not hide the first error.
        with suppress(ContractError, TemporaryError):
            if not any(state.id == request.request for state in open_requests(store)):
                remove_prepared(store, request.request)
    _report_release(arguments, note, verdict, store=store, request=request, result=result)


def _report_release(
    arguments: argparse.Namespace,
    note: runs.StepNote,
    verdict: "Verdict",
    *,
    store: Path,
    request: "ServingRequest",
    result: "ServingAnswer",
) -> None:
    """Write the manifest, the note and the model's card of a request that is done."""
    from evergreen.contracts.requests import RELEASE
    from evergreen.registry.models import read_release, read_serving_target

    rollout = FULL if request.kind == RELEASE else CANARY if request.share else SHADOW
    assert result.version is not None
    done = read_release(store, result.version)
    done.write(arguments.output)
    target = read_serving_target(store)
    serves = SERVES[rollout] if target is not None and target.triton_urls else "is published"
    served = (promotion_journal.current(store), promotion_journal.canary_at_work(store))
    if done.version not in {each.version for each in served if each is not None}:
        serves = "was released for this run earlier, and is no longer served"
    note.reason = f"version {done.version} {serves}; {verdict.sentence}"
    note.facts = {
        "rollout": rollout,
        "version": done.version,
        "previous_version": done.previous_version,
        "parity_max_abs_diff": done.parity_max_abs_diff,
        "parity_rows": done.parity_rows,
    }
    _store_card(arguments, store, done.model_id)


def _now() -> datetime:
    return datetime.now(timezone.utc)


def _store_card(arguments: argparse.Namespace, store: Path, model_id: str) -> None:
    """Write the model's card again with its current state.

    A failure does not affect the release.
    """
    from evergreen.reports.model_card import card_page

    try:
        card = read_card(store, model_id)
        card.write(card_path(store, model_id))
        page = card_page(card)
        runs.keep_report(store, arguments.run, STEP, html=page)
        if arguments.html:
            write_whole(arguments.html, page)
    except (ContractError, OSError) as error:
        logger.warning("the card of model %s could not be written: %s", model_id, error)


if __name__ == "__main__":
    raise SystemExit(main())
