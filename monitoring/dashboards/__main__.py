"""Writes the dashboards' JSON where the manifests take it: `python -m monitoring.dashboards`."""

from __future__ import annotations

from pathlib import Path

from monitoring.dashboards.board import Dashboard, dashboard_text
from monitoring.dashboards.model import model
from monitoring.dashboards.pipeline import pipeline
from monitoring.dashboards.serving import serving

FOLDER = Path(__file__).resolve().parents[2] / "k8s" / "components" / "observability" / "dashboards"


def dashboards() -> dict[str, Dashboard]:
    """Every dashboard by the name of its file.

    Raises:
        ContractError: the autoscaler's queries cannot be read.
    """
    return {"serving.json": serving(), "model.json": model(), "pipeline.json": pipeline()}


def main() -> None:
    """Writes them all."""
    FOLDER.mkdir(exist_ok=True)
    for name, dashboard in dashboards().items():
        (FOLDER / name).write_text(dashboard_text(dashboard), encoding="utf-8")


if __name__ == "__main__":
    main()
