"""Evaluation as a plain command.

Exit code 1 means that the gate refused the candidate (docs/reference/exit-codes.md lists the other
codes).
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evergreen.config.gate import GateSettings
from evergreen.contracts.manifests import Model, RawDataset, TrainingSet, ValidationReport, Verdict
from evergreen.networks import share_cores
from evergreen.registry.model_cards import card_path, completed
from evergreen.registry.models import champion, keep_verdict, scores_path
from evergreen.registry.runs import forget_report, keep_report, step_note
from evergreen.runtime.durable import own_umask, write_whole
from evergreen.runtime.errors import Refused
from evergreen.runtime.exit_codes import ExitCode, exits_with_code
from evergreen.runtime.flags import CommandParser
from evergreen.runtime.plain_text import log_as_text
from evergreen.storage.references import read_reference
from evergreen.storage.uris import local_path

_STEP = "evaluation"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the step's flags."""
    parser = CommandParser(prog="python -m components.evaluation", description=__doc__)
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--store", required=True, help="folder URI of the registry")
    parser.add_argument(
        "--work", required=True, help="folder URI for big data; <work>/<run>/evaluation is written"
    )
    parser.add_argument(
        "--champion",
        default="current",
        help="model to beat: current, none or a released model's id",
    )
    parser.add_argument("--model", required=True, help="path of the candidate's Model manifest")
    parser.add_argument("--output", required=True, help="path of the Verdict manifest to write")
    parser.add_argument("--metrics", help="path for the metrics, as one flat JSON object")
    parser.add_argument("--roc", help="path for the ROC curve, as JSON")
    parser.add_argument("--html", help="path for the page of the model's card")
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run the step. Returns 0 if the candidate is accepted, 1 if the gate refused it."""
    own_umask()
    log_as_text("%(asctime)s %(name)s %(message)s")
    arguments = build_parser().parse_args(argv)
    store = local_path(arguments.store)
    with step_note(store, arguments.run, _STEP) as note:
        forget_report(store, arguments.run, _STEP)
        try:
            verdict = _run(arguments)
        except Refused as error:
            if arguments.html:
                from evergreen.reports.page import refusal_page

                write_whole(Path(arguments.html), refusal_page(_STEP, str(error)))
            raise
        champion, old = verdict.champion, verdict.old_distribution
        note.facts = {
            "decision": verdict.decision,
            "rows": verdict.num_rows,
            "auc": verdict.candidate.auc,
            "champion_auc": champion.auc if champion else None,
            "old_auc": old.candidate.auc if old else None,
            "old_champion_auc": old.champion.auc if old and old.champion else None,
        }
        note.reason = verdict.sentence
        if not verdict.accepted:
            note.state = "refused"
    return ExitCode.DONE if verdict.accepted else ExitCode.REFUSED


def _run(arguments: argparse.Namespace) -> Verdict:
    share_cores()
    from components.evaluation.evaluate import evaluate
    from components.evaluation.report import make_card, metrics_document, roc_document
    from evergreen.reports.model_card import card_page
    from evergreen.statistics.reference import ScoreHistogram

    store, model = local_path(arguments.store), Model.read(arguments.model)
    training_set = read_reference(model.training_set, TrainingSet, source=arguments.model)
    raw = read_reference(training_set.raw_dataset, RawDataset, source="the training set")
    report = training_set.validation_report
    validation = (
        read_reference(report, ValidationReport, source="the training set") if report else None
    )
    evaluation = evaluate(
        raw=raw,
        training_set=training_set,
        model=model,
        champion=champion(store, arguments.champion),
        champion_reference=arguments.champion,
        settings=raw.recommender.section("gate", GateSettings),
        final=local_path(arguments.work) / arguments.run / _STEP,
    )
    if arguments.metrics:
        _write_json(
            arguments.metrics, metrics_document(evaluation.verdict, train_rows=model.num_train_rows)
        )
    if arguments.roc:
        _write_json(arguments.roc, roc_document(evaluation.scored))
    card = completed(
        store, make_card(evaluation, run=arguments.run, model=model, raw=raw, validation=validation)
    )
    page = card_page(card)
    if arguments.html:
        write_whole(Path(arguments.html), page)
    keep_report(store, arguments.run, _STEP, html=page)
    card.write(card_path(store, card.model_id))
    # The monitor compares served scores with this histogram. The histogram is computed from
    # held-out rows, because scores of training rows are overconfident.
    scores = ScoreHistogram.of(evaluation.scored.candidate)
    scores.write(scores_path(store, evaluation.verdict.candidate_model_id))
    verdict = keep_verdict(store, evaluation.verdict, raw)
    # The verdict is written last, so if it exists, all other files exist too.
    verdict.write(arguments.output)
    return verdict


def _write_json(path: str, document: dict[str, Any]) -> None:
    write_whole(Path(path), json.dumps(document, indent=2, allow_nan=False) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
