"""One validation: measure the rows, check them by schema and rules, and write the step's folder.

The caller finds the champion and the schema in force. `__main__` handles flags and the run's note.
Besides the manifest for later steps, the folder has `report.json`, from which `report_page` draws
the page. Keys of the JSON object:

- `kind` ("ValidationReportDocument"), `format_version`, `run`, `decision` (`pass`, `warn` or
  `block`);
- `num_rows`, `num_rows_before` (null without a champion), `champion` (URI of its folder, or null);
- `findings`, `drift`, `label`, `skew`, `served`: as in `manifests.ValidationReport`;
- `quarantine`: `num_rows`, `uri` (null without quarantined rows);
- `schema`: `uri`, and `differences`, a unified diff of each feature between the schema in force and
  a schema that these rows would fit;
- `columns`: for each checked column, in column order: `column`, `kind` (`label`, `number` or
  `category`), `num_values`, `missing`, `missing_before` (shares of rows), `distinct` (about;
  categories), `least`, `most`, `median`, `mean`, `std` (numbers), and `bars`. A bar has `label`,
  `now` and `before`, as shares of the rows that have a value. Columns that identify a user have
  no bars.

A number that does not exist is null.
"""

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from components.validation.checks import Measured, check, measure
from components.validation.findings import Finding, decide
from components.validation.report_page import draw_page
from components.validation.round import Round
from components.validation.rows import checked_columns
from components.validation.schema_versions import compare_schemas, format_schema, read_schema
from components.validation.tfdv_statistics import (
    by_feature,
    missing_share,
    num_rows,
    num_values,
)
from components.validation.windows import KeptWindows, read_windows
from evergreen.config.validation import BLOCK, WARN
from evergreen.contracts import raw_rows
from evergreen.contracts.manifests import Model, RawDataset, ValidationReport
from evergreen.contracts.words import ShownValues
from evergreen.runtime.durable import whole_directory
from evergreen.statistics.column_profile import (
    DENSE_EDGES,
    NUM_BUCKETS,
    ColumnProfile,
    TableProfile,
    find_sums,
)

logger = logging.getLogger(__name__)

_KIND, _FORMAT_VERSION = "ValidationReportDocument", 1
_SCHEMA_FILE, _PROPOSAL_FILE = "schema.pbtxt", "proposed_schema.pbtxt"
_STATISTICS_FILE, _REFERENCE_FILE, _WINDOWS_FILE = "statistics.pb", "reference.npz", "windows.npz"
_HTML_FILE, _JSON_FILE = "report.html", "report.json"
_Bar = dict[str, Any]
_SHOWN_VALUES = 12
"""Maximum number of categories with a bar. The most frequent categories of either side get a
bar."""


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
    with whole_directory(round_.folder, replace=True) as folder:
        measured = measure(round_, folder)
        _write_measured(round_, measured, folder)
        report = make_report(round_, measured, check(measured, round_.rules))
        document = make_document(round_, measured, report)
        (folder / _JSON_FILE).write_text(
            json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8"
        )
        (folder / _HTML_FILE).write_text(draw_page(document), encoding="utf-8")
    logger.info("decision %s: %d findings", report.decision, len(report.findings))
    return Validated(report, measured.rows.dataset)


def _write_measured(round_: Round, measured: Measured, folder: Path) -> None:
    in_force = round_.schema_path
    is_in_force = in_force is not None and read_schema(in_force) == measured.schema
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


def make_report(round_: Round, measured: Measured, findings: Sequence[Finding]) -> ValidationReport:
    """Return the manifest that names the files in the step's folder.

    Dataclasses of the measurement become JSON values.
    """

    def uri(name: str) -> str:
        return (round_.folder / name).as_uri()

    skew = measured.skew
    plain = {
        "findings": [asdict(finding) for finding in findings],
        "drift": [asdict(entry) for entry in measured.drift],
        "label": asdict(measured.label) if measured.label else None,
        "skew": [asdict(entry) for entry in skew.entries] if skew else [],
        "served": asdict(skew.facts) if skew else None,
    }
    return ValidationReport(
        decision=decide(findings),
        reasons=[finding.description for finding in findings if finding.severity in (BLOCK, WARN)],
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


def make_document(round_: Round, measured: Measured, report: ValidationReport) -> dict[str, Any]:
    """Return the document as JSON values."""
    champion = round_.champion
    before = champion.statistics if champion is not None else None
    now, features_before = by_feature(measured.statistics), by_feature(before)
    windows = (measured.window, champion.windows.newest if champion is not None else None)
    names = [name for name in checked_columns(measured.counter.features) if name in now]
    differences = (
        compare_schemas(measured.schema, measured.proposal) if measured.proposal is not None else {}
    )
    return {
        "kind": _KIND,
        "format_version": _FORMAT_VERSION,
        "run": round_.run,
        "decision": report.decision,
        "num_rows": report.num_rows,
        "num_rows_before": num_rows(before) if before is not None else None,
        "champion": champion.folder.as_uri() if champion else None,
        **{
            name: getattr(report, name) for name in ("findings", "drift", "label", "skew", "served")
        },
        "quarantine": {
            "num_rows": measured.rows.dataset.num_quarantined,
            "uri": measured.rows.dataset.quarantine_uri,
        },
        "schema": {"uri": report.schema_uri, "differences": differences},
        "columns": [
            _describe_column(
                name, now[name], features_before.get(name), windows=windows, shown=measured.shown
            )
            for name in names
        ],
    }


def _describe_column(
    name: str,
    now: Any,
    before: Any,
    *,
    windows: tuple[TableProfile, TableProfile | None],
    shown: ShownValues,
) -> dict[str, Any]:
    is_category = now.WhichOneof("stats") == "string_stats"
    column: dict[str, Any] = {
        "column": name,
        "kind": "label" if name == raw_rows.LABEL else "category" if is_category else "number",
        "num_values": num_values(now),
        "missing": missing_share(now),
        "missing_before": missing_share(before),
    }
    if name == raw_rows.LABEL:
        column["bars"] = _label_bars(*windows)
    else:
        of_now, of_before = (
            window.columns.get(name) if window is not None else None for window in windows
        )
        column["bars"] = []
        if of_now is not None and name not in shown.hidden:
            column["bars"] = _feature_bars(of_now, of_before, partial(shown.text, name))
    if is_category:
        return {**column, "distinct": int(now.string_stats.unique)}
    stats = now.num_stats
    numbers = {
        "least": stats.min,
        "most": stats.max,
        "median": stats.median,
        "mean": stats.mean,
        "std": stats.std_dev,
    }
    is_known = num_values(now) > 0
    return {
        **column,
        **{
            key: float(value) if is_known and math.isfinite(value) else None
            for key, value in numbers.items()
        },
    }


def _label_bars(now: TableProfile, before: TableProfile | None) -> list[_Bar]:
    if not now.rows:
        return []
    shares = [window.clicks.rows / window.rows for window in (now, before) if window is not None]
    return [_bar("0", *(1 - share for share in shares)), _bar("1", *shares)]


def _feature_bars(
    now: ColumnProfile, before: ColumnProfile | None, text_of: Callable[[int], str | None]
) -> list[_Bar]:
    """Return bars of the most frequent categories, or of the buckets of a numeric column.

    Empty buckets at both ends are left out.
    """
    sides = [now] if before is None else [now, before]
    if listed := [(side.values, side.sums) for side in sides if side.values is not None]:
        cells = np.unique(np.concatenate([values[:_SHOWN_VALUES] for values, _ in listed]))
        counts, labels = (
            [find_sums(cells, *each)[:, 0] for each in listed],
            [text_of(int(value)) for value in cells],
        )
    else:
        counts, labels = (
            [side.counts for side in sides],
            [_bucket_label(bucket) for bucket in range(NUM_BUCKETS)],
        )
    shares = np.stack([rows / (side.present or 1) for rows, side in zip(counts, sides)])
    if listed:
        chosen = np.argsort(-shares.max(axis=0), kind="stable")[:_SHOWN_VALUES]
    else:
        filled = np.flatnonzero(shares.any(axis=0))
        chosen = np.arange(filled[0], filled[-1] + 1) if len(filled) else filled
    return [_bar(labels[i], *shares[:, i].tolist()) for i in chosen]


def _bucket_label(bucket: int) -> str:
    """Return the range of a bucket of `DENSE_EDGES` as text.

    A bucket of width 1 is named by its integer, such as `7`. Any other bucket is named by its ends.
    """
    low, high = DENSE_EDGES[bucket], DENSE_EDGES[bucket + 1]
    first, last = math.ceil(low), math.ceil(high) - 1
    return f"{first}" if first == last else f"{low:.4g} to {high:.4g}"


def _bar(label: str, now: float, before: float | None = None) -> _Bar:
    return {"label": label, "now": now, "before": before}
