"""HugeCTR's settings, learning rates and workspace: what is computed and refused before a model exists."""

import pytest

from components.runtime.errors import ContractError
from components.training.config import SolverSettings
from components.training.hugectr.embeddings import smallest_workspace_mb


@pytest.mark.parametrize("name", ["stage_rows", "loss_interval"])
def test_a_setting_that_hugectr_would_refuse_later_is_refused_by_name(name):
    with pytest.raises(ContractError, match=f"{name} is 0, expected at least 1"):
        SolverSettings(**{name: 0})


@pytest.mark.parametrize("gpus", [1, 3])
def test_the_workspace_holds_every_row_of_the_fullest_gpu(gpus):
    rows = (smallest_workspace_mb(1_221_286, 16, num_gpus=gpus) << 20) // (3 * 4 * 16)
    assert 0 <= rows - -(-1_221_286 // gpus) < 10_000
