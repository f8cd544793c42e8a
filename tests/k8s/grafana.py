"""The shipped dashboards, and their queries with Grafana's variables filled in."""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.support.rendering import K8S

FOLDER = K8S / "components" / "observability" / "dashboards"
DASHBOARDS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text()) for path in FOLDER.glob("*.json")
}
"""Dashboards by file name."""
CHOSEN = {"namespace": "evergreen", "recommender": "shop", "version": ".+", "model": ".+"}
CHOSEN |= {"__rate_interval": "1m", "__range": "1h"}
"""Values of the variables: a namespace, all versions and models, and Grafana's own. Its minimum
rate interval is four scrapes."""


class PanelQuery(NamedTuple):
    """A query of a dashboard, and its position on the dashboard."""

    dashboard: str
    title: str
    letter: str
    """Name of the query within its panel (a letter), or `mark` for an annotation."""
    expr: str
    """Expression without variables."""

    def __str__(self) -> str:
        return f"{self.dashboard} / {self.title} / {self.letter}"


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the dashboard's panels without row headings."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def filled(text: str) -> str:
    """Replace Grafana's variables in the text. Raises KeyError if a variable is unknown."""
    return re.sub(r"\$\{?(\w+)\}?", lambda match: CHOSEN[match[1]], text)


def queries() -> Iterator[PanelQuery]:
    """Yield every query in all panels and annotations of all dashboards."""
    for name, dashboard in sorted(DASHBOARDS.items()):
        for panel in panels(dashboard):
            for target in panel["targets"]:
                yield PanelQuery(name, panel["title"], target["refId"], filled(target["expr"]))
        for mark in dashboard["annotations"]["list"]:
            yield PanelQuery(name, mark["name"], "mark", filled(mark["expr"]))


def offered(dashboard: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield a variable's name, series selector and label, for each variable that lists a label's
    values.
    """
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            assert match, variable
            yield variable["name"], filled(match[1]), match[2]
