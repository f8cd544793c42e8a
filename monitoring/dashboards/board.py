"""A dashboard of rows of panels as Grafana's JSON: the grid, variables, links and marks of releases.

What the panels show is left to serving, model and pipeline.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from monitoring.dashboards.panels import DATASOURCE, RED, Json, Panel, Row, panel_json

COLUMNS = 24
SCHEMA_VERSION = 39
"""Grafana 10.4 and later take it as it is and migrate it by themselves."""
TAG = "evergreen"
RUNBOOK = "https://github.com/my-fork/evergreen/blob/main/docs/runbook.md"
"""Stands in the file for the address that cluster.env gives."""


@dataclass(frozen=True, kw_only=True)
class Variable:
    """A choice at the top of a dashboard: the values of one label of one metric."""

    name: str
    series: str
    """Selector of the series whose label values are offered."""
    label: str
    default: str | None = None
    """Chosen at first; None = all values, several may be chosen."""


@dataclass(frozen=True, kw_only=True)
class Dashboard:
    """One dashboard; `uid` is its fixed address in Grafana."""

    uid: str
    title: str
    description: str
    variables: Sequence[Variable]
    rows: Sequence[Row]
    time_from: str = "now-6h"
    refresh: str = "30s"


def dashboard_json(dashboard: Dashboard) -> Json:
    """The whole dashboard as `POST /api/dashboards/db` or a provisioned file takes it."""
    return {
        # First, and the runbook's address first in it: the manifests put in its place the one of cluster.env.
        "links": _links(),
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": [TAG],
        "schemaVersion": SCHEMA_VERSION,
        "editable": False,
        "graphTooltip": 1,
        "timezone": "utc",
        "refresh": dashboard.refresh,
        "time": {"from": dashboard.time_from, "to": "now"},
        "annotations": {"list": _marks()},
        "templating": {"list": [_datasource(), *(_variable(each) for each in dashboard.variables)]},
        "panels": _placed(dashboard.rows),
    }


def dashboard_text(dashboard: Dashboard) -> str:
    """The file that ships: a line for each panel and for each other field, so that a change shows as one."""
    body = dashboard_json(dashboard)
    panels = ",\n".join(_line(panel) for panel in body.pop("panels"))
    fields = ",\n".join(f"{_line(name)}: {_line(value)}" for name, value in body.items())
    return f'{{{fields},\n"panels": [\n{panels}\n]}}\n'


def _line(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _placed(rows: Sequence[Row]) -> list[Json]:
    placed: list[Json] = []
    y = 0
    for row in rows:
        placed.append(_at({"type": "row", "title": row.title, "collapsed": False, "panels": []}, 0, y, COLUMNS, 1))
        y += 1
        x = height = 0
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y, height = 0, y + height, 0
            placed.append(_at(panel_json(panel), x, y, panel.width, panel.height))
            x, height = x + panel.width, max(height, panel.height)
        y += height
    return [{"id": n, **body} for n, body in enumerate(placed, start=1)]


def _at(body: Json, x: int, y: int, width: int, height: int) -> Json:
    return {**body, "gridPos": {"x": x, "y": y, "w": width, "h": height}}


def _datasource() -> Json:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1}


def _variable(variable: Variable) -> Json:
    query = f"label_values({variable.series}, {variable.label})"
    body: Json = {
        "name": variable.name,
        "label": variable.name.capitalize(),
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": "Variable"},
        # On each change of the time range: versions come and go.
        "refresh": 2,
        "sort": 3,
    }
    if variable.default is not None:
        return body | {"current": {"text": variable.default, "value": variable.default}}
    everything: Json = {"text": ["All"], "value": ["$__all"]}
    return body | {"multi": True, "includeAll": True, "current": everything}


def _links() -> list[Json]:
    """To the runbook, and to the other dashboards with the same time range and choices."""
    return [
        {"url": RUNBOOK, "type": "link", "title": "Runbook", "icon": "doc", "targetBlank": True},
        {"type": "dashboards", "title": "Evergreen", "tags": [TAG], "keepTime": True, "includeVars": True},
    ]


def _marks() -> list[Json]:
    """Vertical lines where a version went live; the metric's value is the time itself."""
    kinds: tuple[tuple[str, str, str], ...] = (
        ("Releases", "release|promote", "green"),
        ("Rollbacks", "rollback", RED),
    )
    return [_mark(name, actions, colour) for name, actions, colour in kinds]


def _mark(name: str, actions: str, colour: str) -> dict[str, Any]:
    series = f'ctr_monitor_live_since_timestamp_seconds{{namespace="$namespace",action=~"{actions}"}}'
    return {
        "name": name,
        "enable": True,
        "datasource": DATASOURCE,
        "expr": f"max by (action) ({series}) * 1000",
        "useValueForTime": True,
        "titleFormat": "{{action}}",
        "iconColor": colour,
        "step": "60s",
    }


__all__ = ["Dashboard", "Panel", "Row", "Variable", "dashboard_json", "dashboard_text"]
