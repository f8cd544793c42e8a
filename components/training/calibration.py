"""The correction for training rows of which only a share without a click was kept (`TrainingSet.negative_rate`).

Rows without a click that are kept with probability r, whatever their features, have 1/r times the odds of a click that
all rows have: a model of the kept rows has logits that are log(1/r) too large. Its ranking is right, its probabilities
are not. The correction adds log(r) to every logit, which the last bias does alone (King and Zeng 2001, "Logistic
Regression in Rare Events Data", prior correction). Weights in the model store have it; weights of a fit under way,
checkpoints among them, have not, so it is taken back where a fit starts from a parent, and added once where the fit's
final weights are written. It works on HugeCTR's dense file, which both backends write.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from components.contracts.dcn import DcnConfig
from components.contracts.dense_files import read_dense, write_dense
from components.contracts.model_files import DENSE_FILE
from components.runtime.errors import ContractError

BIAS = "final.bias"


def log_odds_correction(negative_rate: float) -> float:
    """What a logit learnt from rows thinned at this rate lacks of one of all rows: log(rate), at most 0.

    Raises:
        ContractError: the rate is not in (0, 1].

    >>> round(log_odds_correction(0.1), 3), log_odds_correction(1.0)
    (-2.303, 0.0)
    """
    if not 0 < negative_rate <= 1:
        raise ContractError(f"negative_rate is {negative_rate}, expected more than 0 and at most 1")
    return math.log(negative_rate)


def shift_logits(weights: Path, config: DcnConfig, by: float) -> None:
    """Adds `by` to every logit of the model in the folder `weights`; 0 leaves its files as they are.

    Raises:
        ContractError: the dense file is absent or of another size.
        PermanentError: it cannot be written.
    """
    if by == 0:
        return
    dense = read_dense(weights / DENSE_FILE, config)
    # In float64: what is added now is taken off by a later round, and only the two roundings to float32 stay.
    dense[BIAS] = (dense[BIAS].astype(np.float64) + by).astype(np.float32)
    write_dense(weights / DENSE_FILE, config, dense)
