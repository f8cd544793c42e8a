"""One validation: statistics, schema, anomalies, drift and rules, in order, written into the step's folder.

Which model is the champion is found by the caller; flags and the run's note are `__main__`'s.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from components.contracts.durable import whole_directory
from components.contracts.manifests import RawDataset, ValidationReport
from components.contracts.uris import local_path
from components.validation import rules
from components.validation.drift import measure_drift
from components.validation.reference import ReferenceCounter
from components.validation.report import write_html
from components.validation.rows import COLUMNS, find_column_faults, parquet_files, read_batches
from components.validation.schema import format_schema, infer_schema, read_schema
from components.validation.settings import ValidationSettings
from components.validation.summarize import num_rows, read_statistics, summarize
from components.validation.tfdv import tfdv

logger = logging.getLogger(__name__)

STATISTICS_FILE = "statistics.pb"
SCHEMA_FILE = "schema.pbtxt"
HTML_FILE = "report.html"
REFERENCE_FILE = "reference.json"


@dataclass(frozen=True, kw_only=True)
class Parent:
    """The champion's files, by which these rows are judged."""

    statistics_path: Path
    schema_path: Path


def validate(
    raw: RawDataset, folder: Path, *, parent: Parent | None, settings: ValidationSettings, title: str
) -> ValidationReport:
    """Judges the training rows of `raw` and fills `folder`, replacing one of an earlier attempt.

    Args:
        raw: The rows of this run.
        folder: Receives statistics, schema and report.
        parent: The champion's files; None infers the schema from these rows and compares nothing.
        settings: Thresholds.
        title: Heading of the report.

    Raises:
        ContractError: a file cannot be read.
    """
    before = read_statistics(parent.statistics_path) if parent else None
    files = parquet_files(local_path(raw.train_uri))
    faults = find_column_faults(files)
    faulty = {fault.column for fault in faults}
    batches = read_batches(files, [column for column in COLUMNS if column not in faulty])
    counter = None if faults else ReferenceCounter()
    now = summarize(counter.counted(batches) if counter else batches)
    logger.info("statistics of %d rows in %d files", num_rows(now), len(files))

    schema = read_schema(parent.schema_path) if parent else infer_schema(now, range_factor=settings.range_factor)
    drift = measure_drift(now, before, settings) if before is not None and num_rows(now) else []
    findings = [
        *rules.judge_structure(faults, now),
        *rules.judge_anomalies(tfdv.validate_statistics(now, schema)),
        *rules.judge_values(now, before, settings),
        *rules.judge_drift(drift, settings),
    ]
    findings.sort(key=lambda finding: (rules.BLOCK, rules.WARN, rules.INFO).index(finding["severity"]))
    decision = rules.decide(findings)
    logger.info("decision %s: %d findings", decision, len(findings))

    with whole_directory(folder, replace=True) as aside:
        (aside / STATISTICS_FILE).write_bytes(now.SerializeToString(deterministic=True))
        schema_bytes = parent.schema_path.read_bytes() if parent else format_schema(schema).encode()
        (aside / SCHEMA_FILE).write_bytes(schema_bytes)
        page = write_html(title=title, decision=decision, findings=findings, drift=drift, now=now, before=before)
        (aside / HTML_FILE).write_text(page, encoding="utf-8")
        if counter:
            counter.statistics().write(aside / REFERENCE_FILE)
    report = _make_report(raw, folder, parent, decision, findings, drift, num_rows(now))
    return replace(report, reference_uri=(folder / REFERENCE_FILE).as_uri()) if counter else report


def _make_report(
    raw: RawDataset,
    folder: Path,
    parent: Parent | None,
    decision: str,
    findings: list[dict[str, Any]],
    drift: list[dict[str, Any]],
    rows: int,
) -> ValidationReport:
    return ValidationReport(
        decision=decision,
        reasons=[f["description"] for f in findings if f["severity"] in (rules.BLOCK, rules.WARN)],
        findings=findings,
        drift=drift,
        num_rows=rows,
        statistics_uri=(folder / STATISTICS_FILE).as_uri(),
        schema_uri=(folder / SCHEMA_FILE).as_uri(),
        report_uri=(folder / HTML_FILE).as_uri(),
        parent_statistics_uri=parent.statistics_path.as_uri() if parent else None,
        raw_digest=raw.digest,
    )
