"""The learning rate that HugeCTR is given at each step; its settings are `SolverSettings`.

HugeCTR's count of steps, Adam's t, starts anew with every model, which is made whenever weights are restored or the
batch size changes, and HugeCTR does not save it. Its step is
`w -= lr * c(t) * m / (sqrt(v) + eps)` with `c(t) = sqrt(1 - beta2^t) / (1 - beta1^t)`; t enters nowhere else, for dense
parameters and embeddings alike. Giving it `lr * c(T) / c(t)`, with T the steps since the weights were initialised,
therefore makes exactly the step of an Adam that never forgot its count (`rate_correction`).
"""

from __future__ import annotations

from components.training.config import TrainingSettings


def rate_correction(settings: TrainingSettings, *, step: int, model_step: int) -> float:
    """What the learning rate of step `step` of all rounds, its model's own step `model_step`, is multiplied by."""
    return _correction(settings, step) / _correction(settings, model_step)


def _correction(settings: TrainingSettings, step: int) -> float:
    return float((1 - settings.beta2**step) ** 0.5 / (1 - settings.beta1**step))
