"""Synthetic evidence for the tests of policies."""

import numpy as np

from monitoring.metrics.window import Kpis
from monitoring.policies.policy import Evidence, MaturedRows

KPIS = Kpis(
    version=1,
    rows=20_000,
    clicks=4100,
    auc=0.76,
    auc_low=0.751,
    auc_high=0.769,
    log_loss=0.5,
    calibration=1.0,
    ctr=0.2,
)


def evidence_of(
    kpis: Kpis = KPIS, *, rows: MaturedRows | None = None, baseline=None, **changes
) -> Evidence:
    """Return evidence about the version of `kpis`, with the version's `rows` and `baseline`."""
    version = changes.pop("version", kpis.version)
    values = {
        "time": 0.0,
        "version": version,
        "serving_since": 0.0,
        "seen_until": changes.get("time", 0.0),
        "kpis": kpis,
        "rows_of": {} if rows is None else {version: rows},
        "lineage": (version,),
        "matured_total": 0,
        "baselines": {} if baseline is None else {version: baseline},
        "drift": (),
    }
    return Evidence(**{**values, **changes})


def rows_of(labels, scores, groups=None) -> MaturedRows:
    """Return rows as policies receive them.

    Each row is its own request unless `groups` is given.
    """
    return MaturedRows(
        labels=np.asarray(labels, np.uint8),
        scores=np.asarray(scores, np.float32),
        groups=np.arange(len(labels)) if groups is None else np.asarray(groups, np.int64),
    )
