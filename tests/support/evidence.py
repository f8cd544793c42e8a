"""Evidence made by hand, for policies that look at some of it."""

import numpy as np

from monitoring.deciding.policy import Evidence, MaturedRows
from monitoring.measures.window import Kpis

NO_ROWS = MaturedRows(labels=np.zeros(0, np.uint8), scores=np.zeros(0, np.float32), groups=np.zeros(0, np.int64))
KPIS = Kpis(
    version=1, rows=20_000, clicks=4100, auc=0.76, auc_low=0.751, auc_high=0.769, log_loss=0.5, calibration=1.0, ctr=0.2
)


def evidence_of(kpis: Kpis = KPIS, **changes) -> Evidence:
    values = {
        "time": 0.0,
        "version": kpis.version,
        "serving_since": 0.0,
        "kpis": kpis,
        "rows": NO_ROWS,
        "matured_total": 0,
        "baseline": None,
        "drift": (),
    }
    return Evidence(**{**values, **changes})


def rows_of(labels, scores, groups=None) -> MaturedRows:
    """Rows as a policy sees them; each its own request unless `groups` says otherwise."""
    return MaturedRows(
        labels=np.asarray(labels, np.uint8),
        scores=np.asarray(scores, np.float32),
        groups=np.arange(len(labels)) if groups is None else np.asarray(groups, np.int64),
    )
