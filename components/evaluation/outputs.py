"""What the Kubeflow UI draws, as JSON files that the component logs: flat metrics, ROC curve, confusion matrix.

Only finite numbers: a NaN or infinity in KFP metadata ends the run.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from components.evaluation.curves import confusion_matrix, roc_curve
from components.evaluation.evaluate import Evaluation
from components.runtime.durable import write_whole

CATEGORIES = ["no click", "click"]


def metrics_document(evaluation: Evaluation) -> dict[str, float]:
    """Names and values of the metrics that exist."""
    verdict = evaluation.verdict
    values: dict[str, float | None] = {
        **verdict.candidate,
        **{f"champion_{name}": value for name, value in (verdict.champion or {}).items()},
        **{f"difference_{name}": value for name, value in (verdict.difference or {}).items()},
        **_old_values(verdict.old_distribution or {}),
        "num_rows": verdict.num_rows,
        "num_clicks": verdict.num_clicks,
        "rows_needed": verdict.rows_needed,
        "accepted": int(verdict.accepted),
    }
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}


def _old_values(old: dict[str, Any]) -> dict[str, float | None]:
    values = {f"old_{name}": value for name, value in old.get("candidate", {}).items()}
    for part in ("champion", "difference"):
        values |= {f"old_{part}_{name}": value for name, value in (old.get(part) or {}).items()}
    return values | {f"old_{name}": old[name] for name in ("num_rows", "num_clicks") if name in old}


def roc_document(evaluation: Evaluation) -> dict[str, Any]:
    """The arguments of KFP's `log_roc_curve` (empty lists with one class only) and `log_confusion_matrix` at 0.5."""
    scored = evaluation.scored
    points = roc_curve(scored.labels, scored.candidate)
    return {
        "roc": {
            "fpr": [point.false_positive_rate for point in points],
            "tpr": [point.true_positive_rate for point in points],
            "threshold": [point.threshold for point in points],
        },
        "confusion": {"categories": CATEGORIES, "matrix": confusion_matrix(scored.labels, scored.candidate)},
    }


def write_json(path: str, document: dict[str, Any]) -> None:
    """Writes `document` to `path`, whole or not at all."""
    write_whole(Path(path), json.dumps(document, indent=2, allow_nan=False) + "\n")
