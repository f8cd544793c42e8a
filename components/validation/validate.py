"""One validation: rows measured, judged by schema and rules, and all of it written into the step's folder.

Which model is the champion, and which schema is in force, is found by the caller; flags and the run's note are left to
`__main__`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from components.contracts.manifests import RawDataset, ValidationReport
from components.runtime.durable import whole_directory
from components.validation.inputs import ValidationRound
from components.validation.judge import judge
from components.validation.measure import Measured, measure
from components.validation.report import SCHEMA_FILE, describe_findings, make_document
from components.validation.report_page import draw_page
from components.validation.rules import BLOCK, WARN, Finding, decide
from components.validation.schema_versions import format_schema
from components.validation.tfdv_statistics import num_rows
from components.validation.windows import KeptWindows

logger = logging.getLogger(__name__)

STATISTICS_FILE = "statistics.pb"
PROPOSAL_FILE = "proposed_schema.pbtxt"
HTML_FILE, JSON_FILE = "report.html", "report.json"
REFERENCE_FILE = "reference.json"
WINDOWS_FILE = "windows.npz"


class Validated(NamedTuple):
    """What one validation returns."""

    report: ValidationReport
    dataset: RawDataset
    """The rows that later steps read: the run's own manifest, or one without the quarantined rows."""


def validate(round_: ValidationRound) -> Validated:
    """Judges the training rows of `round_.raw`, and fills `round_.folder`.

    Raises:
        ContractError: a file cannot be read.
        TemporaryError, PermanentError: the bucket of the served rows cannot be read.
    """
    with whole_directory(round_.folder, replace=True) as folder:
        measured = measure(round_, folder)
        findings = judge(measured, round_.rules)
        _write_schema(round_, measured, folder)
        _write_measured(round_, measured, folder)
        document = make_document(round_, measured, findings)
        (folder / JSON_FILE).write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        (folder / HTML_FILE).write_text(draw_page(document), encoding="utf-8")
        files = {path.name for path in folder.iterdir()}
    report = _make_report(round_, measured, findings, files=files)
    logger.info("decision %s: %d findings", report.decision, len(findings))
    return Validated(report, measured.rows.dataset)


def _write_schema(round_: ValidationRound, measured: Measured, folder: Path) -> None:
    in_force = round_.schema_path
    content = in_force.read_bytes() if in_force else format_schema(measured.schema).encode()
    (folder / SCHEMA_FILE).write_bytes(content)
    if measured.proposal is not None:
        (folder / PROPOSAL_FILE).write_text(format_schema(measured.proposal), encoding="utf-8")


def _write_measured(round_: ValidationRound, measured: Measured, folder: Path) -> None:
    (folder / STATISTICS_FILE).write_bytes(measured.statistics.SerializeToString(deterministic=True))
    if measured.columns.faulty:
        return
    measured.counter.statistics().write(folder / REFERENCE_FILE)
    if measured.window.rows:
        line = round_.champion.windows if round_.champion else KeptWindows(())
        line.followed_by(measured.window).write(folder / WINDOWS_FILE)


def _make_report(
    round_: ValidationRound, measured: Measured, findings: Sequence[Finding], *, files: set[str]
) -> ValidationReport:
    def uri(name: str) -> str:
        return (round_.folder / name).as_uri()

    return ValidationReport(
        decision=decide(findings),
        reasons=[finding.description for finding in findings if finding.severity in (BLOCK, WARN)],
        num_rows=num_rows(measured.statistics),
        statistics_uri=uri(STATISTICS_FILE),
        schema_uri=uri(SCHEMA_FILE),
        report_uri=uri(HTML_FILE),
        json_uri=uri(JSON_FILE),
        parent_statistics_uri=round_.champion.statistics_uri if round_.champion else None,
        raw_digest=measured.rows.dataset.digest,
        reference_uri=uri(REFERENCE_FILE) if REFERENCE_FILE in files else None,
        windows_uri=uri(WINDOWS_FILE) if WINDOWS_FILE in files else None,
        **describe_findings(measured, findings),
    )
