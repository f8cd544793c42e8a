"""The dashboards' JSON has the fields that Grafana's own types have: each is read into them and comes back whole.

By grafana-foundation-sdk, which Grafana generates from its schemas (here of 11.6). A field that it does not know is
dropped on the way, and so would a misspelt one be.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.k8s.grafana import DASHBOARDS, panels

pytest.importorskip("grafana_foundation_sdk", reason="grafana-foundation-sdk is not in this environment")

from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

OUTSIDE_ITS_TYPES = {
    # The Prometheus data source's own fields of an annotation (its source reads them so).
    *(f".annotations.list[].{name}" for name in ("useValueForTime", "titleFormat", "step")),
    # What the editor shows of a variable's query.
    ".templating.list[].definition",
}


def lost(sent: Any, back: Any, path: str = "") -> Iterator[str]:
    """Paths of what was sent and did not come back as it was; places in lists are left out."""
    if isinstance(sent, dict) and isinstance(back, dict):
        for name, value in sent.items():
            if name in back:
                yield from lost(value, back[name], f"{path}.{name}")
            else:
                yield f"{path}.{name}"
    elif isinstance(sent, list) and isinstance(back, list) and len(sent) == len(back):
        for one, other in zip(sent, back):
            yield from lost(one, other, f"{path}[]")
    elif sent != back:
        yield path


def lost_by_grafana(dashboard: dict[str, Any]) -> set[str]:
    """What Grafana's types do not hold."""
    plugins.register_default_plugins()
    back = json.loads(json.dumps(Dashboard.from_json(copy.deepcopy(dashboard)), cls=JSONEncoder))
    return set(lost(dashboard, back))


@pytest.mark.parametrize("name", sorted(DASHBOARDS))
def test_every_field_is_one_of_grafanas(name):
    assert lost_by_grafana(DASHBOARDS[name]) <= OUTSIDE_ITS_TYPES


@pytest.mark.parametrize(
    ("kind", "path", "field"),
    [
        ("timeseries", "fieldConfig.defaults.custom", "lineWidht"),
        ("timeseries", "options.legend", "displaymode"),
        ("stat", "options.reduceOptions", "calc"),
        ("stat", "targets.0", "legend"),
        ("table", "fieldConfig.defaults", "decimal"),
    ],
)
def test_a_misspelt_field_is_lost(kind, path, field):
    dashboard = copy.deepcopy(DASHBOARDS["model"])
    place: Any = next(panel for panel in panels(dashboard) if panel["type"] == kind)
    for step in path.split("."):
        place = place[int(step) if step.isdigit() else step]
    place[field] = 1
    whole = re.sub(r"\.\d+", "[]", f".panels[].{path}.{field}")
    assert lost_by_grafana(dashboard) - OUTSIDE_ITS_TYPES == {whole}


@pytest.mark.parametrize("name", sorted(DASHBOARDS))
def test_every_unit_is_one_of_grafanas(name):
    known = {value for value in vars(units).values() if isinstance(value, str)}
    for panel in panels(DASHBOARDS[name]):
        assert panel["fieldConfig"]["defaults"]["unit"] in known, panel["title"]
