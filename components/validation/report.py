"""The report for machines, `report.json`: all that was found and measured, with each column's distributions.

Keys of the JSON object, from which the page for people (`report_page`) is drawn too:

- `kind` ("ValidationReportDocument"), `format_version`, `run`, `decision` (`pass`, `warn` or `block`);
- `num_rows`, `num_rows_before` (null without a champion), `champion` (URI of its folder, or null);
- `findings`, `drift`, `label`, `skew`, `served`: as in `manifests.ValidationReport`;
- `quarantine`: `num_rows`, `num_by_rule` (quarantined rows, by rule), `uri` (null if there are none);
- `schema`: `uri`, and `differences` between the schema in force and what these rows would make of it, each `feature`,
  `rule`, `kind` (which way it goes), `old`, `new`;
- `columns`: per judged column, in column order: `column`, `kind` (`label`, `number` or `category`), `num_values`,
  `missing`, `missing_before` (shares of rows), `distinct` (about; categories), `least`, `most`, `median`, `mean`,
  `std` (numbers), and `bars`: `label`, `now` and `before` as shares of the rows that have a value.

A number that does not exist is null. Judging is left to `judge`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from components.contracts import criteo
from components.contracts.reference_statistics import DENSE_EDGES
from components.validation.inputs import ValidationRound
from components.validation.measure import Measured
from components.validation.rules import Finding, decide
from components.validation.schema_versions import compare_schemas
from components.validation.tfdv_statistics import (
    by_feature,
    missing_share,
    num_rows,
    num_values,
    value_counts,
)
from components.validation.windows import ColumnSummary, WindowSummary

KIND, FORMAT_VERSION = "ValidationReportDocument", 1
SCHEMA_FILE = "schema.pbtxt"
SHOWN_VALUES = 12
"""Categories with a bar: the most frequent ones of both sides."""


def describe_findings(measured: Measured, findings: Sequence[Finding]) -> dict[str, Any]:
    """`findings`, `drift`, `label`, `skew` and `served` as JSON values, as in `manifests.ValidationReport`."""
    skew = measured.skew
    plain = {
        "findings": [asdict(finding) for finding in findings],
        "drift": [asdict(entry) for entry in measured.drift],
        "label": asdict(measured.label) if measured.label else None,
        "skew": [asdict(entry) for entry in skew.entries] if skew else [],
        "served": asdict(skew.facts) if skew else None,
    }
    values: dict[str, Any] = json.loads(json.dumps(plain, allow_nan=False))
    return values


def make_document(round_: ValidationRound, measured: Measured, findings: Sequence[Finding]) -> dict[str, Any]:
    """The document; JSON takes it as it is."""
    statistics, before = measured.statistics, measured.statistics_before
    now, features_before = by_feature(statistics), by_feature(before)
    known = [criteo.LABEL, *criteo.FEATURES]
    champion = round_.champion
    windows = (measured.window, champion.windows.newest if champion is not None else None)
    names = [name for name in known if name in now] + sorted(name for name in now if name not in known)
    differences = compare_schemas(measured.schema, measured.proposal) if measured.proposal is not None else []
    return {
        "kind": KIND,
        "format_version": FORMAT_VERSION,
        "run": round_.run,
        "decision": decide(findings),
        "num_rows": num_rows(statistics),
        "num_rows_before": num_rows(before) if before is not None else None,
        "champion": champion.folder.as_uri() if champion else None,
        **describe_findings(measured, findings),
        "quarantine": {
            "num_rows": sum(measured.rows.num_by_rule.values()),
            "num_by_rule": dict(measured.rows.num_by_rule),
            "uri": measured.rows.dataset.quarantine_uri,
        },
        "schema": {
            "uri": (round_.folder / SCHEMA_FILE).as_uri(),
            "differences": [difference._asdict() for difference in differences],
        },
        "columns": [_describe_column(name, now[name], features_before.get(name), windows=windows) for name in names],
    }


def _describe_column(
    name: str, now: Any, before: Any, *, windows: tuple[WindowSummary, WindowSummary | None]
) -> dict[str, Any]:
    is_category = now.WhichOneof("stats") == "string_stats"
    column: dict[str, Any] = {
        "column": name,
        "kind": "label" if name == criteo.LABEL else "category" if is_category else "number",
        "num_values": num_values(now),
        "missing": missing_share(now),
        "missing_before": missing_share(before),
    }
    if is_category:
        return {**column, "distinct": int(now.string_stats.unique), "bars": _value_bars(now, before)}
    numbers = now.num_stats
    known = num_values(now) > 0
    for key, value in (
        ("least", numbers.min),
        ("most", numbers.max),
        ("median", numbers.median),
        ("mean", numbers.mean),
        ("std", numbers.std_dev),
    ):
        column[key] = float(value) if known and math.isfinite(value) else None
    if name == criteo.LABEL:
        return {**column, "bars": _label_bars(now, before)}
    summaries = [window.columns.get(name) if window is not None else None for window in windows]
    return {**column, "bars": _bucket_bars(summaries[0], summaries[1])}


def _value_bars(now: Any, before: Any) -> list[dict[str, Any]]:
    counts, counts_before = value_counts(now), value_counts(before)
    rows, rows_before = num_values(now) or 1, num_values(before) or 1
    top = [*list(counts)[:SHOWN_VALUES], *list(counts_before)[:SHOWN_VALUES]]
    shares = {value: (counts.get(value, 0.0) / rows, counts_before.get(value, 0.0) / rows_before) for value in top}
    chosen = sorted(shares, key=lambda value: -max(shares[value]))[:SHOWN_VALUES]
    return [_bar(value, shares[value][0], None if before is None else shares[value][1]) for value in chosen]


def _bucket_bars(now: ColumnSummary | None, before: ColumnSummary | None) -> list[dict[str, Any]]:
    """The buckets from the first to the last one that holds a value of either side; none if the run left it out."""
    if now is None:
        return []
    shares = now.counts / (now.present or 1)
    old = before.counts / (before.present or 1) if before is not None else None
    occupied = np.flatnonzero(shares if old is None else shares + old)
    buckets = range(occupied[0], occupied[-1] + 1) if len(occupied) else ()
    return [_bar(_bucket_label(i), float(shares[i]), None if old is None else float(old[i])) for i in buckets]


def _bucket_label(bucket: int) -> str:
    """The integers of a bucket of `DENSE_EDGES`: `7` for one of width 1, else its ends."""
    low, high = DENSE_EDGES[bucket], DENSE_EDGES[bucket + 1]
    first, last = math.ceil(low), math.ceil(high) - 1
    return f"{first}" if first == last else f"{low:.4g} to {high:.4g}"


def _label_bars(now: Any, before: Any) -> list[dict[str, Any]]:
    if not num_values(now):
        return []
    share = now.num_stats.mean
    old = before.num_stats.mean if num_values(before) else None
    if not 0 <= share <= 1:
        return []
    return [_bar("0", 1 - share, None if old is None else 1 - old), _bar("1", share, old)]


def _bar(label: str, now: float, before: float | None) -> dict[str, Any]:
    return {"label": label, "now": now, "before": before}
