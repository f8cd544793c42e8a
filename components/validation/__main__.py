"""The validation step on a command line: are these rows fit to train on?

Exit code 0: pass or warn. 1: blocked; the report says why. 2: misuse, or input that breaks an agreement.
Parsing needs the standard library only; TFDV is imported when the work begins.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from components.contracts import model_store
from components.contracts.errors import ContractError
from components.contracts.manifests import Model, RawDataset, ValidationReport
from components.contracts.retrain_request import CURRENT
from components.contracts.run_notes import noted
from components.contracts.uris import local_path
from components.validation.settings import ValidationSettings

STEP = "validation"
DONE, REFUSED, MISUSE = 0, 1, 2

_THRESHOLDS = {
    "categorical_drift": "largest change of one category's share that passes without a warning",
    "categorical_drift_relative": "the same, as a part of the most frequent category's share; the smaller one holds",
    "numeric_drift": "largest Jensen-Shannon divergence of an integer column, in bits, that passes without a warning",
    "new_value_share": "largest share of rows with a category unknown to the champion that passes without a warning",
    "missing_share_jump": "largest change of a column's share of missing values that passes without a warning",
    "click_rate_factor": "how many times larger or smaller the share of clicks may be without a warning",
    "false_alarm_rate": "share of the features called drifted that may be called so by chance",
    "range_factor": "how many times the extremes of this run a later value may be (used when the schema is inferred)",
}


def build_parser() -> argparse.ArgumentParser:
    """The parser of the step's flags."""
    parser = argparse.ArgumentParser(prog="python -m components.validation", description=__doc__)
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--store", required=True, help="URI of the model store")
    parser.add_argument("--work", required=True, help="URI of the folder for big files")
    parser.add_argument("--champion", default=CURRENT, help="`current`, `none` or the id of a released model")
    parser.add_argument("--raw-dataset", required=True, type=Path, help="RawDataset manifest to judge")
    parser.add_argument("--output", required=True, type=Path, help="where to write the ValidationReport manifest")
    parser.add_argument("--valid-dataset", type=Path, help="where to write the RawDataset without quarantined rows")
    parser.add_argument(
        "--rules", default="", help="rules over the defaults: a JSON object or the URI of a file with one"
    )
    parser.add_argument("--served", default="", help="archive of served rows to compare with; empty: not compared")
    parser.add_argument("--beam-options", default="", help="Beam pipeline options; empty: the cores of this machine")
    parser.add_argument("--html", type=Path, help="where to copy the report for people")
    for field in fields(ValidationSettings):
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, type=float, default=field.default, help=f"{_THRESHOLDS[field.name]} (%(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the step; see the module's docstring for the exit code."""
    arguments = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        return _run(arguments)
    except ContractError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISUSE


def _run(arguments: argparse.Namespace) -> int:
    settings = ValidationSettings(**{f.name: getattr(arguments, f.name) for f in fields(ValidationSettings)})
    store = local_path(arguments.store)
    folder = local_path(arguments.work) / arguments.run / STEP
    with noted(store, arguments.run, STEP) as note:
        release = model_store.champion(store, arguments.champion)
        raw = RawDataset.read(arguments.raw_dataset)

        from components.validation.validate import Parent, validate

        model = local_path(release.model_uri) if release else None
        parent = Parent(statistics_path=model / Model.STATISTICS, schema_path=model / Model.SCHEMA) if model else None
        title = f"Validation of run {arguments.run}"
        report = validate(raw, folder, parent=parent, settings=settings, title=title)
        report.write(arguments.output)
        if arguments.valid_dataset:
            raw.write(arguments.valid_dataset)
        if arguments.html:
            arguments.html.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(local_path(report.report_uri), arguments.html)
        note.facts = {"decision": report.decision, **metric_values(report)}
        if report.decision == "block":
            note.state, note.reason = "refused", "; ".join(report.reasons)
            return REFUSED
        return DONE


def metric_values(report: ValidationReport) -> dict[str, float]:
    """The report's figures for KFP's Metrics; finite numbers only, `max_drift` absent where nothing was compared."""
    severities = [finding["severity"] for finding in report.findings]
    values: dict[str, float] = {
        "num_rows": report.num_rows,
        "num_findings": len(report.findings),
        "num_blocking": severities.count("block"),
        "num_warnings": severities.count("warn"),
        "num_drifted": sum(entry["severity"] != "info" for entry in report.drift),
    }
    distances = [entry["distance"] for entry in report.drift if entry["distance"] is not None]
    return {**values, "max_drift": max(distances)} if distances else values


if __name__ == "__main__":
    sys.exit(main())
