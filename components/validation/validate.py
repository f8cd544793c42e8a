"""One validation: measure the rows, check them by schema and rules, and write the step's folder.

The caller passes the champion and the schema in force. `__main__` handles the flags and writes the
note of the run. Besides the manifest for later steps, the folder has `report.json` and
`report.html` (`report`).
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from components.validation.checks import check
from components.validation.measure import Measured, measure
from components.validation.quarantine_store import forget_quarantined, keep_quarantined
from components.validation.report import make_document
from components.validation.report_page import draw_page
from components.validation.round import Round
from components.validation.schema_versions import format_schema
from components.validation.tfdv_statistics import num_rows
from components.validation.windows import KeptWindows, read_windows
from evergreen.contracts.checks import RuleCheck, decide, headline
from evergreen.contracts.manifests import Model, RawDataset, ValidationReport
from evergreen.runtime.durable import whole_directory

logger = logging.getLogger(__name__)

_SCHEMA_FILE, _PROPOSAL_FILE = "schema.pbtxt", "proposed_schema.pbtxt"
_STATISTICS_FILE, _REFERENCE_FILE, _WINDOWS_FILE = "statistics.pb", "reference.npz", "windows.npz"
_HTML_FILE, _JSON_FILE = "report.html", "report.json"


class Validated(NamedTuple):
    """Result of one validation."""

    report: ValidationReport
    dataset: RawDataset
    """Rows for later steps: the run's own manifest, or one without the quarantined rows."""


def validate(round_: Round) -> Validated:
    """Check the training rows of `round_.raw`, and fill `round_.folder`.

    Raises:
        ContractError: A file cannot be read.
        TemporaryError, PermanentError: The bucket of the served rows cannot be read.
    """
    forget_quarantined(round_.store, round_.run)
    with whole_directory(round_.folder, replace=True) as folder:
        measured = measure(round_, folder)
        if measured.rows.quarantined:
            num_quarantined = measured.rows.dataset.num_quarantined
            keep_quarantined(
                round_.store, round_.run, measured.rows.quarantined, num_rows=num_quarantined
            )
        _write_measured(round_, measured, folder)
        report = make_report(round_, measured, check(measured, round_.rules))
        document = make_document(round_, measured, report)
        (folder / _JSON_FILE).write_text(
            json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8"
        )
        (folder / _HTML_FILE).write_text(draw_page(document), encoding="utf-8")
    logger.info("decision %s: %s", report.decision, headline(report.checks))
    return Validated(report, measured.rows.dataset)


def _write_measured(round_: Round, measured: Measured, folder: Path) -> None:
    in_force = round_.schema_path
    is_in_force = round_.schema == measured.schema
    content = (
        in_force.read_bytes()
        if in_force and is_in_force
        else format_schema(measured.schema).encode()
    )
    (folder / _SCHEMA_FILE).write_bytes(content)
    if measured.proposal is not None:
        (folder / _PROPOSAL_FILE).write_text(format_schema(measured.proposal), encoding="utf-8")
    (folder / _STATISTICS_FILE).write_bytes(
        measured.statistics.SerializeToString(deterministic=True)
    )
    measured.counter.reference().write(folder / _REFERENCE_FILE)
    if measured.window.rows:
        line = read_windows(round_.parent / Model.WINDOWS) if round_.parent else KeptWindows(())
        line.followed_by(measured.window).write(folder / _WINDOWS_FILE)


def make_report(round_: Round, measured: Measured, checks: Sequence[RuleCheck]) -> ValidationReport:
    """Return the manifest that names the files in the step's folder.

    Dataclasses of the measurement become JSON values.
    """

    def uri(name: str) -> str:
        return (round_.folder / name).as_uri()

    skew = measured.skew
    plain = {
        "drift": [asdict(entry) for entry in measured.drift],
        "label": asdict(measured.label) if measured.label else None,
        "skew": [asdict(entry) for entry in skew.entries] if skew else [],
        "served": asdict(skew.facts) if skew else None,
    }
    return ValidationReport(
        decision=decide(checks),
        checks=list(checks),
        num_rows=num_rows(measured.statistics),
        statistics_uri=uri(_STATISTICS_FILE),
        schema_uri=uri(_SCHEMA_FILE),
        report_uri=uri(_HTML_FILE),
        json_uri=uri(_JSON_FILE),
        parent_statistics_uri=(round_.champion.folder / Model.STATISTICS).as_uri()
        if round_.champion
        else None,
        raw_digest=measured.rows.dataset.digest,
        reference_uri=uri(_REFERENCE_FILE),
        windows_uri=uri(_WINDOWS_FILE) if measured.window.rows else None,
        **json.loads(json.dumps(plain, allow_nan=False)),
    )
