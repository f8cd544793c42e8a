"""The learning rate of each step, given to HugeCTR step by step: its own counters start anew with every model.

Two counters restart there: that of the learning-rate schedule, and Adam's t, which HugeCTR does not save. A model is
made anew whenever weights are restored or the batch size changes, so both are made good here. HugeCTR's step is
`w -= lr * c(t) * m / (sqrt(v) + eps)` with `c(t) = sqrt(1 - beta2^t) / (1 - beta1^t)`; t enters nowhere else, for dense
parameters and embeddings alike. Giving it `lr * c(T) / c(t)`, with T the steps since the weights were initialised,
therefore makes exactly the step of an Adam that never forgot its count.
"""

from __future__ import annotations

from components.training.config import TrainingSettings
from components.training.hugectr.settings import SolverSettings


def scheduled_rate(base: float, solver: SolverSettings, step: int) -> float:
    """HugeCTR's schedule: the learning rate of step number `step`, counted from 1 over all rounds.

    Linear warm-up; then `base`; from `decay_start` on `base * ((start + steps - step) / steps) ^ power`, at least
    `end_lr`.

    >>> solver = SolverSettings(warmup_steps=10, decay_start=20, decay_steps=10, decay_power=1.0, end_lr=0.1)
    >>> [round(scheduled_rate(1.0, solver, step), 3) for step in (1, 10, 15, 25, 99)]
    [0.1, 1.0, 1.0, 0.5, 0.1]
    """
    if step <= solver.warmup_steps:
        return base * step / solver.warmup_steps
    if not solver.decay_start or step <= solver.decay_start:
        return base
    left = max(0.0, (solver.decay_start + solver.decay_steps - step) / solver.decay_steps)
    return max(float(base * left**solver.decay_power), solver.end_lr)


def given_rate(settings: TrainingSettings, solver: SolverSettings, *, step: int, model_step: int) -> float:
    """The learning rate to give HugeCTR for step `step` of all rounds, its model's own step number `model_step`."""
    wanted = scheduled_rate(settings.learning_rate, solver, step)
    return wanted * _correction(settings, step) / _correction(settings, model_step)


def _correction(settings: TrainingSettings, step: int) -> float:
    return float((1 - settings.beta2**step) ** 0.5 / (1 - settings.beta1**step))
