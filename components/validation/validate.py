"""One validation: rows measured, judged by schema and rules, and all of it written into the step's folder.

Which model is the champion, and which schema is in force, is found by the caller; flags and the run's note are left to
`__main__`.
"""

import json
import logging
from pathlib import Path
from typing import NamedTuple

from components.contracts.manifests import Model, RawDataset, ValidationReport
from components.runtime.durable import whole_directory
from components.validation.judge import judge
from components.validation.measure import Measured, measure
from components.validation.report import (
    HTML_FILE,
    JSON_FILE,
    PROPOSAL_FILE,
    REFERENCE_FILE,
    SCHEMA_FILE,
    STATISTICS_FILE,
    WINDOWS_FILE,
    make_document,
    make_report,
)
from components.validation.report_page import draw_page
from components.validation.round import Round
from components.validation.schema_versions import format_schema, read_schema
from components.validation.windows import KeptWindows, read_windows

logger = logging.getLogger(__name__)


class Validated(NamedTuple):
    """What one validation returns."""

    report: ValidationReport
    dataset: RawDataset
    """The rows that later steps read: the run's own manifest, or one without the quarantined rows."""


def validate(round_: Round) -> Validated:
    """Judges the training rows of `round_.raw`, and fills `round_.folder`.

    Raises:
        ContractError: a file cannot be read.
        TemporaryError, PermanentError: the bucket of the served rows cannot be read.
    """
    with whole_directory(round_.folder, replace=True) as folder:
        measured = measure(round_, folder)
        _write_measured(round_, measured, folder)
        report = make_report(round_, measured, judge(measured, round_.rules))
        document = make_document(round_, measured, report)
        (folder / JSON_FILE).write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        (folder / HTML_FILE).write_text(draw_page(document), encoding="utf-8")
    logger.info("decision %s: %d findings", report.decision, len(report.findings))
    return Validated(report, measured.rows.dataset)


def _write_measured(round_: Round, measured: Measured, folder: Path) -> None:
    in_force = round_.schema_path
    is_in_force = in_force is not None and read_schema(in_force) == measured.schema
    content = in_force.read_bytes() if in_force and is_in_force else format_schema(measured.schema).encode()
    (folder / SCHEMA_FILE).write_bytes(content)
    if measured.proposal is not None:
        (folder / PROPOSAL_FILE).write_text(format_schema(measured.proposal), encoding="utf-8")
    (folder / STATISTICS_FILE).write_bytes(measured.statistics.SerializeToString(deterministic=True))
    measured.counter.statistics().write(folder / REFERENCE_FILE)
    if measured.window.rows:
        line = read_windows(round_.parent / Model.WINDOWS) if round_.parent else KeptWindows(())
        line.followed_by(measured.window).write(folder / WINDOWS_FILE)
