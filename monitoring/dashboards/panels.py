"""Panels and queries in the few terms that the dashboards here need, and the JSON Grafana takes for them.

Which panels there are is said by serving, model and pipeline; where they stand, by `board`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
"""Whatever data source the reader picks at the top of the dashboard."""
GREEN, YELLOW, RED, BLUE = "green", "yellow", "red", "blue"
NEUTRAL = ((None, BLUE),)
"""A number that is neither good nor bad."""
ALARM_ABOVE_ZERO = ((None, GREEN), (1, RED))
ALARM_BELOW_ONE = ((None, RED), (1, GREEN))

Steps = tuple[tuple[float | None, str], ...]
"""Colours from each value on; the first has no value."""


@dataclass(frozen=True)
class Query:
    """One PromQL query and the name of its series, with labels in double braces."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel. `kind` is Grafana's panel type: `timeseries`, `stat` or `table`."""

    title: str
    description: str
    queries: Sequence[Query]
    kind: str = "timeseries"
    unit: str = "short"
    """A unit's id in Grafana."""
    width: int = 8
    """Of 24 columns."""
    height: int = 7
    least: float | None = None
    most: float | None = None
    """Ends of the axis; None = as the data asks."""
    decimals: int | None = None
    steps: Steps = NEUTRAL
    is_stacked: bool = False
    dashed: Sequence[str] = ()
    """Names of series that are limits: drawn as dashed red lines."""
    band: tuple[str, str] | None = None
    """Names of the upper and the lower series with the area between them filled."""
    repeat: str | None = None
    """Variable of which each chosen value gets a panel of its own."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """A table's columns: label, or `Value #A` for the first query, to heading, in order."""


@dataclass(frozen=True)
class Row:
    """A headed group of panels."""

    title: str
    panels: Sequence[Panel]


def panel_json(panel: Panel) -> Json:
    """The panel as Grafana's dashboard JSON has it, without `id` and `gridPos`."""
    is_now = panel.kind != "timeseries"
    body: Json = {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "targets": [_target(query, chr(ord("A") + n), panel.kind, is_now) for n, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": _overrides(panel)},
        "options": _options(panel.kind),
    }
    if panel.repeat:
        body |= {"repeat": panel.repeat, "repeatDirection": "h", "maxPerRow": 3}
    if panel.kind == "table":
        body["transformations"] = _one_table(panel.columns)
    return body


def _target(query: Query, letter: str, kind: str, is_now: bool) -> Json:
    target: Json = {"refId": letter, "datasource": DATASOURCE, "expr": query.expr, "legendFormat": query.legend}
    form = "table" if kind == "table" else "time_series"
    return target | {"instant": is_now, "range": not is_now, "format": form}


def _defaults(panel: Panel) -> Json:
    defaults: Json = {
        "unit": panel.unit,
        "thresholds": {
            "mode": "absolute",
            "steps": [{"value": value, "color": colour} for value, colour in panel.steps],
        },
    }
    ends = {"min": panel.least, "max": panel.most, "decimals": panel.decimals}
    defaults |= {name: value for name, value in ends.items() if value is not None}
    if panel.kind == "timeseries":
        # Gaps stay gaps: a number that does not exist is absent, and a line over it would tell one.
        custom: Json = {"lineWidth": 1, "fillOpacity": 0, "showPoints": "auto", "spanNulls": False}
        if panel.is_stacked:
            custom |= {"stacking": {"mode": "normal", "group": "A"}, "fillOpacity": 40}
        defaults["custom"] = custom
    elif panel.kind == "stat":
        defaults |= {"color": {"mode": "thresholds"}, "noValue": "undefined"}
    elif panel.steps != NEUTRAL:
        defaults |= {"color": {"mode": "thresholds"}, "custom": {"cellOptions": {"type": "color-text"}}}
    return defaults


def _overrides(panel: Panel) -> list[Json]:
    overrides = [
        _override(
            name,
            ("color", {"mode": "fixed", "fixedColor": RED}),
            ("custom.lineStyle", {"fill": "dash", "dash": [10, 10]}),
            ("custom.stacking", {"mode": "none"}),
        )
        for name in panel.dashed
    ]
    if panel.band:
        upper, lower = panel.band
        edge = (("custom.lineWidth", 0), ("color", {"mode": "fixed", "fixedColor": BLUE}))
        overrides.append(_override(upper, *edge, ("custom.fillBelowTo", lower), ("custom.fillOpacity", 20)))
        overrides.append(_override(lower, *edge))
    return overrides


def _override(series: str, *properties: tuple[str, Any]) -> Json:
    return {
        "matcher": {"id": "byName", "options": series},
        "properties": [{"id": name, "value": value} for name, value in properties],
    }


def _options(kind: str) -> Json:
    if kind == "timeseries":
        return {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    if kind == "stat":
        return {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "colorMode": "value"}
    return {"showHeader": True}


def _one_table(columns: Mapping[str, str]) -> list[Json]:
    """The queries' tables joined on their common labels, with only these columns."""
    return [
        {"id": "merge", "options": {}},
        {
            "id": "filterFieldsByName",
            "options": {"include": {"names": list(columns)}},
        },
        {
            "id": "organize",
            "options": {
                "indexByName": {name: place for place, name in enumerate(columns)},
                "renameByName": {name: heading for name, heading in columns.items() if name != heading},
            },
        },
    ]
