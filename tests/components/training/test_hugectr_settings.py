"""HugeCTR's settings, learning rates and workspace: what is computed and refused before a model exists."""

from __future__ import annotations

import numpy as np
import pytest

from components.runtime.errors import ContractError
from components.training.config import TrainingSettings
from components.training.hugectr.settings import SolverSettings, parse_solver, rate_correction, smallest_workspace_mb


def test_a_document_overrides_the_defaults():
    assert parse_solver("") == SolverSettings()
    solver = parse_solver('{"vvgpu": [[0, 3]], "stage_rows": 500}')
    assert (solver.vvgpu, solver.num_gpus, solver.stage_rows) == (((0, 3),), 2, 500)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "solver is '{', expected a JSON object"),
        ("[1]", "expected a JSON object"),
        ('{"vgpu": [[0]]}', "unexpected keyword argument 'vgpu'"),
        ('{"vvgpu": [0]}', "expected a JSON object"),
        ('{"vvgpu": [[0], [1]]}', r"vvgpu is \[\[0\], \[1\]\], expected one node's GPUs"),
        ('{"vvgpu": [[0, 0]]}', "expected one node's GPUs"),
        ('{"vvgpu": [["0"]]}', "expected one node's GPUs"),
        ('{"stage_rows": 1.5}', "stage_rows is 1.5, expected a whole number of at least 1"),
        ('{"loss_interval": 0}', "loss_interval is 0, expected a whole number of at least 1"),
    ],
)
def test_a_wrong_document_is_refused_by_name(text, message):
    with pytest.raises(ContractError, match=message):
        parse_solver(text)


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
