"""One validation: rows screened, measured, judged by schema and rules, and all of it written into the step's folder.

Which model is the champion, and which schema is in force, is found by the caller; flags and the run's note are
`__main__`'s.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from components.contracts.manifests import RawDataset, ValidationReport
from components.runtime.durable import whole_directory
from components.storage.uris import local_path
from components.validation import rules
from components.validation.judgement import judge
from components.validation.measuring import Measured, measure
from components.validation.quarantine.screening import Screened
from components.validation.quarantine.set_aside import screen_and_keep
from components.validation.reports.document import Found, make_document
from components.validation.reports.page import draw_page
from components.validation.rows import (
    find_column_faults,
    find_lake_faults,
    find_new_columns,
    parquet_files,
    without_known,
)
from components.validation.schema import format_schema, infer_schema, read_schema
from components.validation.schemas.compare import compare
from components.validation.schemas.proposal import propose_schema
from components.validation.skew.archive import Archive
from components.validation.summarize import num_rows, read_statistics, summarize_files

logger = logging.getLogger(__name__)

STATISTICS_FILE = "statistics.pb"
SCHEMA_FILE = "schema.pbtxt"
PROPOSAL_FILE = "proposed_schema.pbtxt"
HTML_FILE, JSON_FILE = "report.html", "report.json"
REFERENCE_FILE = "reference.json"
WINDOWS_FILE = "windows.npz"


@dataclass(frozen=True, kw_only=True)
class Parent:
    """The champion's files, by which these rows are judged."""

    statistics_path: Path
    schema_path: Path
    folder: Path


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one validation works."""

    run: str
    folder: Path
    """The step's folder; filled, replacing one of an earlier attempt."""
    store: Path
    """The model store, which keeps what is set aside."""


class Validated(NamedTuple):
    """What one validation answers."""

    report: ValidationReport
    dataset: RawDataset
    """The rows that later steps read: the run's own manifest, or one without the rows that were set aside."""


def validate(
    raw: RawDataset,
    place: Place,
    *,
    parent: Parent | None,
    schema_path: Path | None,
    judging: rules.Judging,
    served: Archive | None = None,
    summarize: Callable[..., Any] = summarize_files,
) -> Validated:
    """Judges the training rows of `raw`.

    Args:
        raw: The rows of this run.
        place: Receives statistics, schema, report and rows.
        parent: The champion's files; None compares with nothing.
        schema_path: The schema in force; None infers it from these rows.
        judging: Rules and thresholds.
        served: Archive of served rows, see `skew.archive`; None compares with none.
        summarize: Gives the statistics of files, as `summarize_files` or a runner of Beam does.

    Raises:
        ContractError: a file cannot be read; TemporaryError, PermanentError: nor the bucket of the served rows.
    """
    before, in_force = parent and read_statistics(parent.statistics_path), schema_path and read_schema(schema_path)
    champion, excluded = parent.folder if parent else None, frozenset(raw.excluded_columns)
    compared: dict[str, Any] = {"before": before, "champion": champion, "judging": judging}
    with whole_directory(place.folder, replace=True) as aside:
        files = parquet_files(local_path(raw.train_uri))
        (retyped, new_in_lake), faults = find_lake_faults(raw), find_column_faults(files)
        new_columns = without_known([*find_new_columns(files), *new_in_lake], in_force)
        screened = Screened(raw, files)
        if not faults:
            at: dict[str, Any] = {"run": place.run, "store": place.store}
            screened = screen_and_keep(raw, files, aside, place.folder, schema=in_force, **at, **compared)
        measured = measure(
            screened.dataset, screened.files, faults, aside, served=served, summarize=summarize, **compared
        )
        factor = judging.settings.range_factor
        schema = in_force or infer_schema(measured.now, range_factor=factor, excluded=excluded)
        findings = judge(
            measured,
            faults=[*faults, *retyped, *new_columns],
            screened=screened.findings,
            schema=schema,
            before=before,
            judging=judging,
            excluded=excluded,
        )
        (aside / SCHEMA_FILE).write_bytes(schema_path.read_bytes() if schema_path else format_schema(schema).encode())
        found = _found(place, findings, measured, screened, before, champion)
        if in_force is not None:
            proposal = propose_schema(schema, measured.now, new_columns, range_factor=factor, excluded=excluded)
            found = replace(found, schema_differences=_write_proposal(aside, schema, proposal))
        _write_measured(measured, aside, faulty=bool(faults))
        _write_report(found, aside)
        names = {path.name for path in aside.iterdir()}
    logger.info("decision %s: %d findings", found.decision, len(findings))
    report = _make_report(findings, measured, screened.dataset, place.folder, parent, names)
    return Validated(report, screened.dataset)


def _found(
    place: Place,
    findings: list[rules.Finding],
    measured: Measured,
    screened: Screened,
    before: Any | None,
    champion: Path | None,
) -> Found:
    return Found(
        run=place.run,
        decision=rules.decide(findings),
        findings=findings,
        drift=measured.drift,
        now=measured.now,
        before=before,
        champion=champion.as_uri() if champion else None,
        label=measured.label,
        skew=measured.skew.entries,
        served=measured.skew.facts or None,
        num_by_rule=screened.num_by_rule,
        quarantine_uri=screened.dataset.quarantine_uri,
        schema_uri=(place.folder / SCHEMA_FILE).as_uri(),
    )


def _write_proposal(folder: Path, schema: Any, proposal: Any | None) -> list[dict[str, Any]]:
    """Writes what `schema` would have to become for these rows, if anything, and gives the differences."""
    if proposal is None:
        return []
    (folder / PROPOSAL_FILE).write_text(format_schema(proposal), encoding="utf-8")
    return [difference._asdict() for difference in compare(schema, proposal)]


def _write_measured(measured: Measured, folder: Path, *, faulty: bool) -> None:
    (folder / STATISTICS_FILE).write_bytes(measured.now.SerializeToString(deterministic=True))
    if faulty:
        return
    measured.counter.statistics().write(folder / REFERENCE_FILE)
    if measured.window.rows:
        measured.line.followed_by(measured.window).write(folder / WINDOWS_FILE)


def _write_report(found: Found, folder: Path) -> None:
    document = make_document(found)
    (folder / JSON_FILE).write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    (folder / HTML_FILE).write_text(draw_page(document), encoding="utf-8")


def _make_report(
    findings: list[rules.Finding],
    measured: Measured,
    dataset: RawDataset,
    folder: Path,
    parent: Parent | None,
    names: set[str],
) -> ValidationReport:
    return ValidationReport(
        decision=rules.decide(findings),
        reasons=[f["description"] for f in findings if f["severity"] in (rules.BLOCK, rules.WARN)],
        findings=findings,
        drift=measured.drift,
        num_rows=num_rows(measured.now),
        statistics_uri=(folder / STATISTICS_FILE).as_uri(),
        schema_uri=(folder / SCHEMA_FILE).as_uri(),
        report_uri=(folder / HTML_FILE).as_uri(),
        parent_statistics_uri=parent.statistics_path.as_uri() if parent else None,
        raw_digest=dataset.digest,
        reference_uri=(folder / REFERENCE_FILE).as_uri() if REFERENCE_FILE in names else None,
        windows_uri=(folder / WINDOWS_FILE).as_uri() if WINDOWS_FILE in names else None,
        json_uri=(folder / JSON_FILE).as_uri(),
        label=measured.label,
        skew=measured.skew.entries,
        served=measured.skew.facts or None,
    )
