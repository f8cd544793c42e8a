"""The validation step on a command line: are these rows fit to train on?

Exit code 0: pass or warn. 1: blocked; the report says why. 2: misuse, or input that breaks an agreement. 3: the work
failed and may succeed later: a process was killed, a Beam job, a bucket or a disk failed. 70: a fault of the program,
with its traceback; the rows were not judged.
Parsing needs the standard library only; TFDV is imported when the work begins.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.contracts.manifests import Model, RawDataset, ValidationReport
from components.contracts.retrain_request import CURRENT
from components.runtime.errors import ContractError, PermanentError, TemporaryError
from components.runtime.exit_codes import ExitCode
from components.storage.uris import local_path
from components.store import models as model_store
from components.store.run_notes import noted
from components.store.run_reports import forget_report, keep_report
from components.validation.rules import NOTIFY, read_rules
from components.validation.settings import ValidationSettings

if TYPE_CHECKING:
    from components.validation.skew.archive import Archive

STEP = "validation"
DONE, REFUSED, MISUSE, FAILED = 0, 1, 2, 3

_THRESHOLDS = {
    "categorical_drift": "change of one category's share from which on it is drift, if it is no chance",
    "categorical_drift_relative": "the same, as a part of the share that the category had; the smaller one holds",
    "numeric_drift": "Jensen-Shannon divergence, in bits, from which on it is drift, if it is no chance",
    "mean_drift": "shift of an integer column's mean, in standard deviations, from which on it is drift",
    "missing_drift": "change of a column's share of missing values from which on it is drift, if it is no chance",
    "new_value_share": "largest share of rows with a category unknown to the champion that passes without a warning",
    "missing_share_jump": "largest change of a column's share of missing values that passes without a warning",
    "click_rate_factor": "how many times larger or smaller the share of clicks may be without a warning",
    "false_alarm_rate": "share of the features called drifted that may be called so by chance",
    "skew_share": "largest share of rows, trained on and served under one name, whose value may differ",
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
        "--rules", default="", help="rules over the defaults: a JSON object, or the URI of a file or object with one"
    )
    parser.add_argument(
        "--served",
        default="",
        help="archive of served rows to compare with: absolute path, file:// or gs://; empty: not compared",
    )
    parser.add_argument("--beam-options", default="", help="Beam pipeline options; empty: the cores of this machine")
    parser.add_argument(
        "--processes", type=int, default=0, help="processes that read the rows; 0: one per core, fewer for few rows"
    )
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
    except (TemporaryError, PermanentError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except Exception:
        # Python's own code for it is 1, which says here that the rows were judged and refused.
        traceback.print_exc()
        return ExitCode.DEFECT


def _run(arguments: argparse.Namespace) -> int:
    settings = ValidationSettings(**{f.name: getattr(arguments, f.name) for f in fields(ValidationSettings)})
    store = local_path(arguments.store)
    folder = local_path(arguments.work) / arguments.run / STEP
    with noted(store, arguments.run, STEP) as note:
        forget_report(store, arguments.run, STEP)
        judging = read_rules(arguments.rules, settings)
        served = _open_served(arguments.served)
        release = model_store.champion(store, arguments.champion)
        raw = RawDataset.read(arguments.raw_dataset)

        summarize = _summarizer(arguments, folder.parent)
        from components.validation.schemas.curated import schema_in_force
        from components.validation.validate import Parent, Place, validate

        parent = None
        if release:
            model = local_path(release.model_uri)
            statistics, schema = model / Model.STATISTICS, model / Model.SCHEMA
            parent = Parent(statistics_path=statistics, schema_path=schema, folder=model)
        in_force = schema_in_force(store, parent.schema_path if parent else None)
        place = Place(run=arguments.run, folder=folder, store=store)
        report, valid = validate(
            raw,
            place,
            parent=parent,
            schema_path=in_force,
            judging=judging,
            served=served,
            summarize=summarize,
        )
        report.write(arguments.output)
        if arguments.valid_dataset:
            valid.write(arguments.valid_dataset)
        if arguments.html:
            arguments.html.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(local_path(report.report_uri), arguments.html)
        _keep_report(store, arguments.run, report)
        note.facts = {"decision": report.decision, **metric_values(report)}
        if told := [finding["description"] for finding in report.findings if finding["action"] == NOTIFY]:
            note.facts[NOTIFY] = told
        if report.decision == "block":
            note.state, note.reason = "refused", "; ".join(report.reasons)
            return REFUSED
        return DONE


def _open_served(uri: str) -> Archive | None:
    """Before TFDV is imported, and before a row is read: a wrong URI is told at once."""
    if not uri:
        return None
    from components.validation.skew.archive import open_archive

    return open_archive(uri)


def _summarizer(arguments: argparse.Namespace, scratch: Path) -> Callable[..., Any]:
    """What gives the statistics of the rows: processes of this machine, or a runner of Beam."""
    if arguments.processes < 0:
        raise ContractError(f"--processes is {arguments.processes}, expected 0 or more")
    if arguments.beam_options:
        # Before whatever imports TFDV, which would leave Beam without Google's clients.
        from components.validation.beam_job import parse_options, summarize_on_beam

        return partial(summarize_on_beam, options=parse_options(arguments.beam_options), scratch=scratch)
    from components.validation.summarize import summarize_files

    return partial(summarize_files, processes=arguments.processes or None)


def _keep_report(store: Path, run: str, report: ValidationReport) -> None:
    """In the store too: the folder for big files may be emptied while people still read."""
    document = local_path(report.json_uri).read_bytes() if report.json_uri else None
    keep_report(store, run, STEP, html=local_path(report.report_uri).read_bytes(), document=document)


def metric_values(report: ValidationReport) -> dict[str, float]:
    """The report's figures for KFP's Metrics; finite numbers only, those absent that do not exist."""
    severities = [finding["severity"] for finding in report.findings]
    values: dict[str, float] = {
        "num_rows": report.num_rows,
        "num_findings": len(report.findings),
        "num_blocking": severities.count("block"),
        "num_warnings": severities.count("warn"),
        "num_drifted": sum(entry["severity"] != "info" for entry in report.drift),
        "num_quarantined": sum(finding.get("num_quarantined", 0) for finding in report.findings),
    }
    for finding in report.findings:
        # One figure per rule and what it did, such as `warn_drift`: how many findings.
        name = f"{finding['action']}_{finding['rule']}"
        values[name] = values.get(name, 0) + 1
    if report.served is not None:
        values["num_skewed"] = sum(entry["severity"] != "info" for entry in report.skew)
        values["num_joined"] = report.served["num_joined"]
    distances = [entry["distance"] for entry in report.drift if entry["distance"] is not None]
    return {**values, "max_drift": max(distances)} if distances else values


if __name__ == "__main__":
    sys.exit(main())
