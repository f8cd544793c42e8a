"""From what a YAML file says of a dashboard to Grafana's own model of it, by grafana-foundation-sdk.

The SDK is generated from Grafana's schemas, so a field that Grafana does not know cannot be written. It is needed here
alone: what ships is the JSON. Which panels there are is left to serving.yaml, model.yaml and pipeline.yaml.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grafana_foundation_sdk.builders import common, prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

TAG = "evergreen"
SCHEMA_VERSION = 39
"""Grafana 10.4 and later take it as it is and migrate it by themselves."""
RUNBOOK = "https://github.com/my-fork/evergreen/blob/main/docs/runbook.md"
"""Stands in the file for the address that cluster.env gives."""
DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
"""Whatever data source the reader picks at the top of the dashboard."""
RED, BLUE = "red", "blue"
STEPS: dict[str, list[tuple[float | None, str]]] = {
    "neutral": [(None, BLUE)],
    "alarm_above_zero": [(None, "green"), (1, RED)],
    "alarm_below_one": [(None, RED), (1, "green")],
}
"""Colours from each value on, by name; the first has no value."""


@dataclass(frozen=True, kw_only=True)
class PanelSpec:
    """One panel, as the YAML files write it."""

    title: str
    description: str
    kind: str = "timeseries"
    """`timeseries`, `stat` or `table`."""
    query: str | None = None
    """The one query of a panel whose series needs no name, in PromQL."""
    queries: Mapping[str, str] | Sequence[str] = ()
    """By the name of the series, with labels in double braces; a table's without names."""
    unit: str = "short"
    """A unit's id in Grafana."""
    size: tuple[int, int] | None = None
    """Width of 24 columns, and height in rows of the grid; None = as is usual for the kind."""
    least: float | None = None
    """Lower end of the axis; None = as the data asks."""
    most: float | None = None
    decimals: int | None = None
    steps: str | Sequence[tuple[float | None, str]] = "neutral"
    """A name of `STEPS`, or colours from each value on."""
    is_stacked: bool = False
    dashed: Sequence[str] = ()
    """Names of series that are limits: drawn as dashed red lines."""
    band: tuple[str, str] | None = None
    """Names of the upper and the lower series with the area between them filled."""
    repeat: str | None = None
    """Variable of which each chosen value gets a panel of its own."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """A table's columns: label, or `Value #A` for the first query, to heading, in order."""

    @property
    def named_queries(self) -> Sequence[tuple[str, str]]:
        """Name of the series and PromQL of each query."""
        if self.query is not None:
            return [("", self.query)]
        if isinstance(self.queries, Mapping):
            return list(self.queries.items())
        return [("", expr) for expr in self.queries]


def build_panel(spec: PanelSpec) -> Any:
    """The panel as the SDK's builder, without its place on the grid."""
    builder = {"timeseries": _line_panel, "stat": _stat_panel, "table": _table_panel}[spec.kind]
    panel = builder(spec)
    width, height = spec.size or ((4, 4) if spec.kind == "stat" else (8, 7))
    panel.title(spec.title).description(spec.description).datasource(DATASOURCE).unit(spec.unit)
    panel.span(width).height(height)
    steps = STEPS[spec.steps] if isinstance(spec.steps, str) else spec.steps
    colours = [models.Threshold(value=value, color=colour) for value, colour in steps]
    panel.thresholds(builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(colours))
    for place, (legend, expr) in enumerate(spec.named_queries):
        query = prometheus.Dataquery().expr(expr).legend_format(legend).datasource(DATASOURCE)
        query.ref_id(chr(ord("A") + place))
        query.format(PromQueryFormat.TABLE if spec.kind == "table" else PromQueryFormat.TIME_SERIES)
        panel.with_target(query.range() if spec.kind == "timeseries" else query.instant())
    for name, value in (("decimals", spec.decimals), ("min", spec.least), ("max", spec.most), ("repeat", spec.repeat)):
        if value is not None:
            getattr(panel, name)(value)
    return panel


def _stat_panel(spec: PanelSpec) -> Any:
    """The newest value, large, in the colour of its step."""
    panel = stat.Panel().color_mode(kinds.BigValueColorMode.VALUE).no_value("undefined")
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False))
    return panel.color_scheme(builders.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))


def _line_panel(spec: PanelSpec) -> Any:
    """Lines over time."""
    panel = timeseries.Panel().line_width(1).fill_opacity(40 if spec.is_stacked else 0)
    # Gaps stay gaps: a number that does not exist is absent, and a line across would invent one.
    panel.show_points(kinds.VisibilityMode.AUTO).span_nulls(False)
    legend = common.VizLegendOptions().display_mode(kinds.LegendDisplayMode.LIST).show_legend(True)
    panel.legend(legend.placement(kinds.LegendPlacement.BOTTOM))
    panel.tooltip(common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI).sort(kinds.SortOrder.DESCENDING))
    if spec.is_stacked:
        panel.stacking(common.StackingConfig().mode(kinds.StackingMode.NORMAL).group("A"))
    for name in spec.dashed:
        line = {"fill": "dash", "dash": [10, 10]}
        properties = {"color": _fixed(RED), "custom.lineStyle": line, "custom.stacking": {"mode": "none"}}
        panel.override_by_name(name, _properties(properties))
    if spec.band is not None:
        upper, lower = spec.band
        edge = {"custom.lineWidth": 0, "color": _fixed(BLUE)}
        panel.override_by_name(upper, _properties({**edge, "custom.fillBelowTo": lower, "custom.fillOpacity": 20}))
        panel.override_by_name(lower, _properties(edge))
    return panel.repeat_direction("h").max_per_row(3) if spec.repeat else panel


def _table_panel(spec: PanelSpec) -> Any:
    """The queries' newest values joined on their common labels, with only the columns that are named."""
    panel = table.Panel().show_header(True)
    if spec.steps != "neutral":
        panel.color_scheme(builders.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
        panel.cell_options(kinds.TableColorTextCellOptions())
    order = {name: place for place, name in enumerate(spec.columns)}
    headings = {name: heading for name, heading in spec.columns.items() if name != heading}
    steps: list[tuple[str, dict[str, Any]]] = [
        ("merge", {}),
        ("filterFieldsByName", {"include": {"names": list(spec.columns)}}),
        ("organize", {"indexByName": order, "renameByName": headings}),
    ]
    for kind, options in steps:
        panel.with_transformation(models.DataTransformerConfig(id_val=kind, options=options))
    return panel


def _variable(name: str, series: str) -> Any:
    """A choice at the top: the values of the label `name` of `series`; of all but the namespace several at once."""
    choice = builders.QueryVariable(name).label(name.capitalize()).datasource(DATASOURCE)
    choice.query({"query": f"label_values({series}, {name})", "refId": "Variable"})
    # Asked on each change of the time range: versions come and go.
    choice.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(models.VariableSort.NUMERICAL_ASC)
    if name == "namespace":
        return choice.current(models.VariableOption(text="evergreen", value="evergreen"))
    everything = models.VariableOption(text=["All"], value=["$__all"])
    return choice.multi(True).include_all(True).current(everything)


def build_dashboard(spec: Mapping[str, Any]) -> models.Dashboard:
    """The dashboard that a YAML file says, laid out by the SDK.

    Args:
        spec: `uid`, its fixed address in Grafana; `title`, `description`, `time_from`, `refresh`; `variables`, the
            series that each is a label of; `rows`, panels by heading.
    """
    board = builders.Dashboard(spec["title"]).uid(spec["uid"]).description(spec["description"]).tags([TAG]).readonly()
    board.timezone("utc").tooltip(models.DashboardCursorSync.CROSSHAIR)
    board.refresh(spec["refresh"]).time(spec["time_from"], "now")
    # The runbook first: see `dashboard_text`.
    link = builders.DashboardLink("Runbook").type(models.DashboardLinkType.LINK).url(RUNBOOK)
    board.link(link.icon("doc").target_blank(True))
    others = builders.DashboardLink("Evergreen").type(models.DashboardLinkType.DASHBOARDS).tags([TAG])
    board.link(others.keep_time(True).include_vars(True))
    board.with_variable(builders.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    for name, series in spec["variables"].items():
        board.with_variable(_variable(name, series))
    for heading, panels in spec["rows"].items():
        board.with_row(builders.Row(heading))
        for panel in panels:
            board.with_panel(build_panel(PanelSpec(**panel)))
    built = board.build()
    for number, placed in enumerate(built.panels or [], start=1):
        placed.id_val = number
    return built


def dashboard_text(board: models.Dashboard) -> str:
    """The file that ships: a line for each panel and for each other field, so that a change shows as one.

    The runbook's address is the first value of the first link: the manifests replace it by its place in the text.
    """
    body = json.loads(json.dumps(board, cls=JSONEncoder))
    body["schemaVersion"] = SCHEMA_VERSION
    links = body.pop("links")
    links[0] = {"url": links[0].pop("url"), **links[0]}
    # The Prometheus data source's own fields of an annotation are not among the SDK's.
    body["annotations"] = {"list": [_mark("Releases", "release|promote", "green"), _mark("Rollbacks", "rollback", RED)]}
    panels = ",\n".join(_line(panel) for panel in body.pop("panels"))
    fields = ",\n".join(f"{_line(name)}: {_line(value)}" for name, value in {"links": links, **body}.items())
    return f'{{{fields},\n"panels": [\n{panels}\n]}}\n'


def _mark(name: str, actions: str, colour: str) -> dict[str, Any]:
    """Vertical lines where a version went live; the metric's value is the time itself."""
    series = f'ctr_monitor_live_since_timestamp_seconds{{namespace="$namespace",action=~"{actions}"}}'
    return {
        "name": name,
        "enable": True,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "expr": f"max by (action) ({series}) * 1000",
        "useValueForTime": True,
        "titleFormat": "{{action}}",
        "iconColor": colour,
        "step": "60s",
    }


def _fixed(colour: str) -> dict[str, str]:
    return {"mode": "fixed", "fixedColor": colour}


def _properties(values: Mapping[str, Any]) -> list[models.DynamicConfigValue]:
    return [models.DynamicConfigValue(id_val=name, value=value) for name, value in values.items()]


def _line(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
