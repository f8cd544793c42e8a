"""The validation step on a command line: check whether rows are fit for training.

The exit code is 0 for pass and warn, and 1 for fail (docs/reference/exit-codes.md). The report
lists the reasons. Parsing needs the standard library only. TFDV is imported when the work begins.
"""

import argparse
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evergreen.config.validation import NOTIFY, UNLEARNABLE, ValidationSettings
from evergreen.contracts.checks import FAIL, WARN, headline, metrics
from evergreen.contracts.manifests import CURRENT, Model, RawDataset, ValidationReport
from evergreen.registry import models as registry
from evergreen.registry.runs import forget_report, keep_report, step_note
from evergreen.runtime.durable import own_umask
from evergreen.runtime.errors import run_again
from evergreen.runtime.exit_codes import ExitCode, exits_with_code
from evergreen.runtime.flags import CommandParser
from evergreen.runtime.plain_text import log_as_text
from evergreen.storage.references import keep
from evergreen.storage.uris import local_path

if TYPE_CHECKING:
    from components.validation.validate import Validated

_STEP = "validation"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the step's flags."""
    parser = CommandParser(prog="python -m components.validation", description=__doc__)
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--store", required=True, help="URI of the registry")
    parser.add_argument("--work", required=True, help="URI of the folder for big files")
    parser.add_argument(
        "--champion", default=CURRENT, help="`current`, `none` or the id of a released model"
    )
    parser.add_argument(
        "--raw-dataset", required=True, type=Path, help="RawDataset manifest to check"
    )
    parser.add_argument(
        "--output", required=True, type=Path, help="where to write the ValidationReport manifest"
    )
    parser.add_argument(
        "--valid-dataset", type=Path, help="where to write the RawDataset without quarantined rows"
    )
    parser.add_argument(
        "--served",
        default="",
        help="archive of served rows to compare with: absolute path, file:// or gs://; empty: not "
        "compared",
    )
    parser.add_argument(
        "--beam-options", default="", help="Beam pipeline options; empty: the cores of this machine"
    )
    parser.add_argument("--html", type=Path, help="where to copy the report for people")
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run the step. Returns `REFUSED` if the rows are blocked."""
    own_umask()
    arguments = build_parser().parse_args(argv)
    log_as_text("%(levelname)s %(name)s: %(message)s")
    # TensorFlow reads this variable once, at import. The value 3 logs only errors. Google's
    # packages warn about Python's version.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    warnings.simplefilter("ignore", FutureWarning)
    store = local_path(arguments.store)
    with step_note(store, arguments.run, _STEP) as note:
        forget_report(store, arguments.run, _STEP)
        report = _run_step(arguments, store)
        note.facts = {"decision": report.decision, **metric_values(report)}
        if notified := [each.detail for each in report.checks if each.action == NOTIFY]:
            note.facts[NOTIFY] = notified
        if report.decision == FAIL:
            note.state = "refused"
            note.reason = f"{headline(report.checks)}; {_advice(report, arguments)}"
            return ExitCode.REFUSED
        return ExitCode.DONE


def _advice(report: ValidationReport, arguments: argparse.Namespace) -> str:
    """Return advice on how to continue after rows were blocked."""
    correct = "correct the rows and ingest them again"
    blocking = {check.rule for check in report.checks if check.result == FAIL}
    if blocking & UNLEARNABLE:
        return correct
    set_already = (
        RawDataset.read(arguments.raw_dataset)
        .recommender.section(_STEP, ValidationSettings)
        .actions
    )
    actions = json.dumps(
        {**set_already, **dict.fromkeys(sorted(blocking), WARN)}, separators=(",", ":")
    )
    again = run_again(f"--set 'validation.actions={actions}'")
    return f"{correct}, or, if the rows are correct, {again}"


def _run_step(arguments: argparse.Namespace, store: Path) -> ValidationReport:
    # Check settings before TFDV is imported and before a row is read.
    raw = RawDataset.read(arguments.raw_dataset)
    rules = raw.recommender.section(_STEP, ValidationSettings)
    release = registry.champion(store, arguments.champion)

    from components.validation.measure import LineageWindows, read_champion, read_windows
    from components.validation.quarantine import rows_folder
    from components.validation.schema_versions import schema_in_force
    from components.validation.skew import open_served
    from components.validation.validate import Inputs, validate

    model = local_path(release.model_uri) if release else None
    parent = raw.parent_model_id
    for model_id in filter(None, {release.model_id if release else None, parent}):
        registry.verified_part(registry.stored_model(store, model_id), Model.PARTS[-1])
    validated = validate(
        Inputs(
            run=arguments.run,
            raw=raw,
            folder=local_path(arguments.work) / arguments.run / _STEP,
            quarantine=rows_folder(store, arguments.run),
            rules=rules,
            champion=read_champion(model) if model else None,
            parent_windows=read_windows(registry.model_folder(store, parent) / Model.WINDOWS)
            if parent
            else LineageWindows(()),
            schema_path=schema_in_force(store, model / Model.SCHEMA if model else None),
            served=open_served(arguments.served) if arguments.served else None,
            summarize=_choose_summarizer(arguments.beam_options),
        )
    )
    _write_outputs(validated, arguments, store)
    return validated.report


def _write_outputs(validated: "Validated", arguments: argparse.Namespace, store: Path) -> None:
    """Write the manifests for later steps, and copy the report for people."""
    report = validated.report
    report.write(arguments.output)
    html, document = local_path(report.report_uri), local_path(report.json_uri)
    if arguments.valid_dataset:
        reference = keep(report, html.with_name("validation_report.json"))
        replace(validated.dataset, validation_report=reference).write(arguments.valid_dataset)
    if arguments.html:
        arguments.html.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(html, arguments.html)
    # The registry stores a copy of the report, because the folder for big files may be emptied
    # while people still read the report.
    keep_report(store, arguments.run, _STEP, html=html.read_bytes(), document=document.read_bytes())


def _choose_summarizer(beam_options: str) -> Callable[..., Any]:
    """Return the function that computes statistics: on this machine, or on a runner of Beam."""
    if beam_options:
        from components.validation.beam_job import parse_options, summarize_on_beam

        return partial(summarize_on_beam, options=parse_options(beam_options))
    from components.validation.tfdv_statistics import summarize_files

    return summarize_files


def metric_values(report: ValidationReport) -> dict[str, float]:
    """Return the report's numbers for KFP's metrics. Undefined numbers are left out."""
    results = [check.result for check in report.checks]
    values: dict[str, float] = {
        "num_rows": report.num_rows,
        "num_checks": len(results),
        "num_failed": results.count(FAIL),
        "num_warnings": results.count(WARN),
        "num_drifted": sum(entry["drifted"] for entry in report.drift),
        "num_quarantined": sum(check.num_quarantined for check in report.checks),
        **metrics(report.checks),
    }
    if report.served is not None:
        values["num_skewed"] = sum(entry["drifted"] for entry in report.skew)
        values["num_joined"] = report.served["num_joined"]
    effects = [entry["effect"] for entry in report.drift if entry["effect"] is not None]
    return {**values, "max_drift": max(effects)} if effects else values


if __name__ == "__main__":
    sys.exit(main())
