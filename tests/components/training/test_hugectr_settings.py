"""HugeCTR's settings, learning rates and workspace: what is computed and refused before a model exists."""

from __future__ import annotations

import numpy as np
import pytest

from components.runtime.errors import ContractError
from components.training.config import SolverSettings, TrainingSettings
from components.training.hugectr.embeddings import smallest_workspace_mb
from components.training.hugectr.rates import rate_correction


@pytest.mark.parametrize("name", ["stage_rows", "loss_interval"])
def test_a_setting_that_hugectr_would_refuse_later_is_refused_by_name(name):
    with pytest.raises(ContractError, match=f"{name} is 0, expected at least 1"):
        SolverSettings(**{name: 0})


def test_the_corrected_rate_makes_good_for_the_step_count_that_hugectr_forgets():
    # Adam of one number, restarted after 30 steps as HugeCTR does, against one that was not.
    settings = TrainingSettings()
    random = np.random.default_rng(0)
    gradients = random.normal(size=60)
    weights = {"unbroken": 1.0, "restarted": 1.0}
    for name in weights:
        m = v = 0.0
        for step, g in enumerate(gradients, start=1):
            t = step - 30 if name == "restarted" and step > 30 else step
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            rate = 0.1 * rate_correction(settings, step=step, model_step=t)
            weights[name] -= rate * np.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / (np.sqrt(v) + 1e-7)
    assert weights["unbroken"] == pytest.approx(weights["restarted"], rel=1e-12)
    assert abs(weights["unbroken"] - 1.0) > 0.01


@pytest.mark.parametrize("gpus", [1, 3])
def test_the_workspace_holds_every_row_of_the_fullest_gpu(gpus):
    rows = (smallest_workspace_mb(1_221_286, 16, num_gpus=gpus) << 20) // (3 * 4 * 16)
    assert 0 <= rows - -(-1_221_286 // gpus) < 10_000
