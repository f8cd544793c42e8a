"""What the study fixes: days, policies and how a round learns. Why each is as it is stands in docs/freshness.md."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from benchmarks.freshness_study.days import FROZEN, Days
from benchmarks.freshness_study.rounds import Learning
from components.contracts.criteo import NUM_CATEGORICAL, NUM_DENSE
from components.models.configs import DcnConfig
from components.preprocessing.vocabularies import AdmissionRules
from components.training.config import TrainingSettings
from inference_client.simulation.slow_drift import DriftingWorld

CONTROL = "every 5 h"
"""The policy that also runs in a world where nothing moves: what it gains there comes from more rows."""

LEARNING = Learning(
    config=DcnConfig(num_dense=NUM_DENSE, num_categorical=NUM_CATEGORICAL),
    first=TrainingSettings(max_epochs=3),
    # One pass: each row is learnt once, as online training does. No halvings: within hours there is no jump to find.
    # Rate and batch were chosen among eight pairs by hourly and half-hourly rounds, in the world of another seed.
    round=TrainingSettings(max_epochs=1, num_halvings=0, learning_rate=0.0003, batch_size=1024, min_batch_size=1024),
    rules=AdmissionRules(frequency_threshold=5),
)


def days_of(seed: int, *, is_quick: bool) -> Days:
    """Two days after two days; quick: eight hours after eight, of half as many rows."""
    policies = {FROZEN: math.inf, "every 5 h": 5.0, "every 1 h": 1.0, "every 30 min": 0.5}
    hours, rows = (8, 20_000) if is_quick else (48, 40_000)
    return Days(earlier_hours=hours, hours=hours, rows_per_hour=rows, intervals=policies, seed=seed)


def described(world: DriftingWorld, days: Days) -> dict[str, Any]:
    """The plan as JSON-ready values."""
    return {
        "drift": asdict(world.drift),
        "bayes_auc": world.at(days.earlier_hours).bayes_auc,
        "days": {
            "earlier_hours": days.earlier_hours,
            "hours": days.hours,
            "rows_per_hour": days.rows_per_hour,
            "seed": days.seed,
        },
        "learning": {
            "config": LEARNING.config.as_document(),
            "first": LEARNING.first.deciding(),
            "round": LEARNING.round.deciding(),
            "frequency_threshold": LEARNING.rules.frequency_threshold,
        },
    }
