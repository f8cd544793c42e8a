"""Validate the training rows of one run, from the rows to the report.

`validate` calls the stages in order. Each stage returns a typed value for the next stages:

1. `quarantine` screens the rows.
2. `measure` computes statistics, and compares them with the schema, the champion and served rows.
3. `checks` compares the measurements with the limits of the rules.
4. `report` makes the document of the report, and `report_page` draws it.

`__main__` reads the flags, finds the inputs, and writes the note of the run.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from components.validation.checks import check
from components.validation.measure import Champion, LineageWindows, Measured, measure
from components.validation.quarantine import screen_rows, store_quarantined
from components.validation.report import make_document
from components.validation.report_page import draw_page
from components.validation.schema_versions import format_schema, read_schema
from components.validation.tfdv_statistics import TableStatistics, summarize_files
from evergreen.config.validation import DOMAIN, ValidationSettings
from evergreen.contracts.category_texts import ShownValues, read_texts
from evergreen.contracts.checks import RuleCheck, decide, headline
from evergreen.contracts.manifests import Model, RawDataset, ValidationReport
from evergreen.runtime.durable import whole_directory
from evergreen.storage.objects import Objects
from evergreen.storage.uris import local_path

logger = logging.getLogger(__name__)

_SCHEMA_FILE, _PROPOSAL_FILE = "schema.pbtxt", "proposed_schema.pbtxt"
_STATISTICS_FILE, _REFERENCE_FILE, _WINDOWS_FILE = "statistics.pb", "reference.npz", "windows.npz"
_HTML_FILE, _JSON_FILE = "report.html", "report.json"


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Inputs of one validation."""

    run: str
    raw: RawDataset
    """Training rows to check."""
    folder: Path
    """The step's folder. Validation writes its results into this folder, and replaces the results
    of an earlier attempt."""
    quarantine: Path
    """Folder of the registry for the rows that this run quarantines (`quarantine.rows_folder`)."""
    rules: ValidationSettings
    champion: Champion | None = None
    """Model for the comparison."""
    parent_windows: LineageWindows = LineageWindows(())
    """Windows of the model that the run continues. Without windows, the model is trained from
    scratch."""
    schema_path: Path | None = None
    """Path of the schema in force. None means that the schema is inferred from the rows."""
    served: Objects | None = None
    """Served rows for the comparison with the training rows. None disables the comparison."""
    summarize: Callable[..., TableStatistics] = summarize_files
    """Function that computes the statistics of files, on this machine or on a runner of Beam."""

    @cached_property
    def schema(self) -> Any | None:
        """Schema in force, or None."""
        return read_schema(self.schema_path) if self.schema_path else None

    @cached_property
    def shown(self) -> ShownValues:
        """Names of the categories in reports, and the columns that reports hide."""
        texts = read_texts(local_path(self.raw.texts_uri)) if self.raw.texts_uri else {}
        return ShownValues(texts=texts, hidden=self.raw.recommender.columns_of_users)


class Validated(NamedTuple):
    """Result of one validation."""

    report: ValidationReport
    dataset: RawDataset
    """Rows for later steps: the run's own manifest, or a manifest without the quarantined rows."""


def validate(inputs: Inputs) -> Validated:
    """Check the training rows of `inputs.raw`, and fill `inputs.folder`.

    Raises:
        ContractError: A file cannot be read.
        TemporaryError, PermanentError: The bucket of the served rows cannot be read.
    """
    rules = inputs.rules
    with whole_directory(inputs.folder, replace=True) as folder:
        rows = screen_rows(
            inputs.raw,
            inputs.schema,
            action=rules.action_of(DOMAIN),
            folder=folder,
            final=inputs.folder,
            quarantine=inputs.quarantine,
        )
        measured = measure(
            rows,
            schema=inputs.schema,
            champion=inputs.champion,
            settings=rules,
            served=inputs.served,
            summarize=inputs.summarize,
            shown=inputs.shown,
        )
        if rows.quarantined:
            num_quarantined = rows.dataset.num_quarantined
            store_quarantined(
                inputs.run, rows.quarantined, inputs.quarantine, num_rows=num_quarantined
            )
        checks = check(measured, rules)
        report = make_report(measured, checks, folder=inputs.folder)
        logger.info("decision %s: %s", report.decision, headline(report.checks))
        document = make_document(inputs.run, measured, report)
        _write_measured(measured, inputs, folder)
        (folder / _JSON_FILE).write_text(
            json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8"
        )
        (folder / _HTML_FILE).write_text(draw_page(document), encoding="utf-8")
    return Validated(report, rows.dataset)


def make_report(
    measured: Measured, checks: Sequence[RuleCheck], *, folder: Path
) -> ValidationReport:
    """Return the manifest that names the files in the step's folder.

    Dataclasses of the measurement become JSON values.
    """

    def uri(name: str) -> str:
        return (folder / name).as_uri()

    skew, champion = measured.skew, measured.champion
    plain = {
        "drift": [asdict(entry) for entry in measured.drift],
        "label": asdict(measured.label) if measured.label else None,
        "skew": [asdict(entry) for entry in skew.entries] if skew else [],
        "served": asdict(skew.facts) if skew else None,
    }
    return ValidationReport(
        decision=decide(checks),
        checks=list(checks),
        num_rows=measured.statistics.num_rows,
        statistics_uri=uri(_STATISTICS_FILE),
        schema_uri=uri(_SCHEMA_FILE),
        report_uri=uri(_HTML_FILE),
        json_uri=uri(_JSON_FILE),
        parent_statistics_uri=(champion.folder / Model.STATISTICS).as_uri() if champion else None,
        raw_digest=measured.rows.dataset.digest,
        reference_uri=uri(_REFERENCE_FILE),
        windows_uri=uri(_WINDOWS_FILE) if measured.window.rows else None,
        **json.loads(json.dumps(plain, allow_nan=False)),
    )


def _write_measured(measured: Measured, inputs: Inputs, folder: Path) -> None:
    """Write the files that become parts of the model if a model is trained on these rows."""
    in_force = inputs.schema_path
    content = (
        in_force.read_bytes()
        if in_force and inputs.schema == measured.schema
        else format_schema(measured.schema).encode()
    )
    (folder / _SCHEMA_FILE).write_bytes(content)
    if measured.proposal is not None:
        (folder / _PROPOSAL_FILE).write_text(format_schema(measured.proposal), encoding="utf-8")
    measured.statistics.write(folder / _STATISTICS_FILE)
    measured.counter.reference().write(folder / _REFERENCE_FILE)
    if measured.window.rows:
        windows = inputs.parent_windows.followed_by(measured.window)
        windows.write(folder / _WINDOWS_FILE)
