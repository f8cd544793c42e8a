"""From scores to figures: AUC per hour, gains over the frozen model with their intervals, and what the world allowed.

Gains are in AUC points: 1 point = 0.01 of AUC. Each is the mean over hours of the difference within an hour, since
rows of different hours were scored by different models. Its interval is DeLong's: hours hold different rows, so the
variances of the hours' paired differences add up. It says how sure these rows make us of these models' difference in
this world; another seed is another world.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.freshness_study.days import BEST, FROZEN, Scores
from components.contracts.metrics import Z_95, auc_difference, normalized_entropy, roc_auc

POINTS = 100.0
PUBLISHED = {"every 5 h": 0.24, "every 1 h": 0.34, "every 30 min": 0.37}
"""Monolith (Liu et al. 2022, arXiv 2209.07663), table 2: mean AUC of DeepFM on Criteo's rows, trained on from batch
training with parameters synchronised at this interval, minus that of batch training alone; in AUC points."""


def figures(scores: Scores) -> dict[str, Any]:
    """All figures of one run as JSON-ready values."""
    names = [*scores.num_rounds]
    return {
        "rows": len(scores.label),
        "clicks": int(scores.label.sum()),
        "hourly_auc": {name: _hourly(scores, name) for name in scores.by},
        "mean_auc": {name: float(np.mean(_hourly(scores, name))) for name in scores.by},
        "gain_over_frozen": {name: gain(scores, name, FROZEN) for name in names if name != FROZEN},
        "gain_over_slower": {
            name: gain(scores, name, slower) for slower, name in zip(names, names[1:]) if slower != FROZEN
        },
        "below_best": {name: gain(scores, BEST, name) for name in scores.by if name != BEST},
        "normalized_entropy": {name: normalized_entropy(scores.label, by) for name, by in scores.by.items()},
        "rounds": scores.num_rounds,
        "models": scores.num_models,
        "round_seconds": {name: round(seconds, 1) for name, seconds in scores.seconds.items()},
    }


def gain(scores: Scores, name: str, reference: str) -> dict[str, float]:
    """Mean over hours of AUC(name) - AUC(reference) in points, with its 95 % interval."""
    differences, variances = [], []
    for part in _hours(scores):
        found = auc_difference(scores.label[part], scores.by[name][part], scores.by[reference][part])
        assert found is not None, "an hour has clicks and other rows"
        differences.append(found.auc)
        variances.append(found.standard_error**2)
    mean, error = float(np.mean(differences)), float(np.sqrt(np.sum(variances)) / len(variances))
    return {
        "points": POINTS * mean,
        "low": POINTS * (mean - Z_95 * error),
        "high": POINTS * (mean + Z_95 * error),
    }


def _hourly(scores: Scores, name: str) -> list[float]:
    aucs = [roc_auc(scores.label[part], scores.by[name][part]) for part in _hours(scores)]
    return [auc for auc in aucs if auc is not None]


def _hours(scores: Scores) -> list[slice]:
    """The rows of each hour; they lie in time order."""
    edges: NDArray[np.int64] = np.searchsorted(scores.hour, np.arange(scores.hour[-1] + 2))
    return [slice(int(a), int(b)) for a, b in zip(edges, edges[1:])]
