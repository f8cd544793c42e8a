"""The report of one validation as a JSON object, for programs and for `report_page`.

Keys:

- `kind` ("ValidationReportDocument"), `format_version`, `run`, `decision` (`pass`, `warn` or
  `fail`);
- `num_rows`, `num_rows_before` (null without a champion), `champion` (URI of its folder, or null);
- `checks`, `drift`, `label`, `skew`, `served`: as in `manifests.ValidationReport`;
- `quarantine`: `num_rows`, `uri` (null without quarantined rows);
- `schema`: `uri`, and `differences`, a unified diff of each feature between the schema in force and
  a schema that these rows would fit;
- `columns`: one object for each checked column, in column order.

Keys of an object in `columns`:

- `column`, `kind` (`label`, `number` or `category`), `num_values`;
- `missing`, `missing_before`: shares of the rows without a value;
- `distinct`: approximate number of categories;
- `least`, `most`, `median`, `mean`, `std`: statistics of numbers;
- `bars`: the column's histogram. A bar has a `label`, and the shares `now` and `before` of the rows
  with a value. Columns that identify a user have no bars.

A number that does not exist is null.
"""

import math
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from components.validation.measure import Measured
from components.validation.schema_versions import compare_schemas
from components.validation.tfdv_statistics import ColumnStatistics, checked_columns
from evergreen.contracts import raw_rows
from evergreen.contracts.category_texts import ShownValues
from evergreen.contracts.manifests import ValidationReport
from evergreen.statistics.column_profile import (
    DENSE_EDGES,
    NUM_BUCKETS,
    ColumnProfile,
    TableProfile,
    find_sums,
)

_KIND, _FORMAT_VERSION = "ValidationReportDocument", 2
_Bar = dict[str, Any]
_SHOWN_VALUES = 12
"""Maximum number of categories with a bar in a chart. The bars show the most frequent categories of
the new rows and of the champion's rows."""


def make_document(run: str, measured: Measured, report: ValidationReport) -> dict[str, Any]:
    """Return the document of `run` as JSON values."""
    champion = measured.champion
    before = champion.statistics if champion is not None else None
    now, columns_before = measured.statistics.columns, before.columns if before is not None else {}
    windows = (measured.window, champion.windows.newest if champion is not None else None)
    names = [name for name in checked_columns(measured.counter.features) if name in now]
    differences = (
        compare_schemas(measured.schema, measured.proposal) if measured.proposal is not None else {}
    )
    return {
        "kind": _KIND,
        "format_version": _FORMAT_VERSION,
        "run": run,
        "decision": report.decision,
        "num_rows": report.num_rows,
        "num_rows_before": before.num_rows if before is not None else None,
        "champion": champion.folder.as_uri() if champion else None,
        "checks": [asdict(check) for check in report.checks],
        **{name: getattr(report, name) for name in ("drift", "label", "skew", "served")},
        "quarantine": {
            "num_rows": measured.rows.dataset.num_quarantined,
            "uri": measured.rows.dataset.quarantine_uri,
        },
        "schema": {"uri": report.schema_uri, "differences": differences},
        "columns": [
            _describe_column(
                name, now[name], columns_before.get(name), windows=windows, shown=measured.shown
            )
            for name in names
        ],
    }


def _describe_column(
    name: str,
    now: ColumnStatistics,
    before: ColumnStatistics | None,
    *,
    windows: tuple[TableProfile, TableProfile | None],
    shown: ShownValues,
) -> dict[str, Any]:
    is_category = now.distinct is not None
    column: dict[str, Any] = {
        "column": name,
        "kind": "label" if name == raw_rows.LABEL else "category" if is_category else "number",
        "num_values": now.num_values,
        "missing": now.missing_share,
        "missing_before": before.missing_share if before is not None else None,
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
        return {**column, "distinct": now.distinct}
    numbers = ("least", "most", "median", "mean", "std")
    return {**column, **{number: getattr(now, number) for number in numbers}}


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

    A bucket of width 1 is named by its integer, such as `7`. The names of wider buckets contain
    both bounds.
    """
    low, high = DENSE_EDGES[bucket], DENSE_EDGES[bucket + 1]
    first, last = math.ceil(low), math.ceil(high) - 1
    return f"{first}" if first == last else f"{low:.4g} to {high:.4g}"


def _bar(label: str, now: float, before: float | None = None) -> _Bar:
    return {"label": label, "now": now, "before": before}
