"""Writes the dashboards' JSON where the manifests take it: `python -m monitoring.dashboards`."""

from __future__ import annotations

from pathlib import Path

import yaml
from grafana_foundation_sdk.models.dashboard import Dashboard

from components.runtime.exit_codes import exits_with_code
from k8s.scaling.manifests import ADAPTER, read_queries
from monitoring.dashboards.panels import build_dashboard, dashboard_text

DEFINITIONS = Path(__file__).resolve().parent
FOLDER = Path(__file__).resolve().parents[2] / "k8s" / "components" / "observability" / "dashboards"


def dashboards() -> dict[str, Dashboard]:
    """Every dashboard by the name of its file.

    Raises:
        ContractError: the autoscaler's queries cannot be read.
    """
    shipped = read_queries(ADAPTER, namespace="$namespace", pods=("POD",))
    found = {}
    for path in sorted(DEFINITIONS.glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        for metric, query in shipped.items():
            # What is drawn is what the autoscaler sees.
            drawn = query.replace('pod="POD"', 'pod=~"triton-.+"').replace("'", "''")
            text = text.replace(f"'autoscaler: {metric}'", f"'{drawn}'")
        found[f"{path.stem}.json"] = build_dashboard(yaml.safe_load(text))
    return found


@exits_with_code
def main() -> int:
    """Writes them all."""
    FOLDER.mkdir(exist_ok=True)
    for name, dashboard in dashboards().items():
        (FOLDER / name).write_text(dashboard_text(dashboard), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
