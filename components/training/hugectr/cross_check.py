"""HugeCTR's own evaluation against the scores computed from its files: two answers to the same question.

Scores, gate and serving all go by what we take the files to mean. If HugeCTR itself ranks the same rows as well as they
do, the files mean what we think; if not, the model must not be released.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.contracts.metrics import roc_auc
from components.runtime.errors import PermanentError
from components.training.hugectr.settings import SolverSettings
from components.training.hugectr.staging import write_stage
from components.training.rows import Rows

logger = logging.getLogger(__name__)


def require_same_auc(
    model: Any, rows: Rows, scores: NDArray[np.float32], *, solver: SolverSettings, folder: Path, group_rows: int
) -> None:
    """Compares the AUC of `scores` with HugeCTR's on the same rows, as many as its evaluation takes.

    Nothing is compared where there is no AUC: for want of a whole evaluation batch, of a class, or of finite scores;
    the log says so.

    Args:
        model: A compiled `hugectr.Model` holding the weights that `scores` came from.
        rows: The rows.
        scores: Their probabilities.
        solver: The evaluation's size and the tolerance.
        folder: Where to stage the rows.
        group_rows: Rows of a row group that the model's readers have room for.

    Raises:
        PermanentError: they differ by more than `auc_tolerance`.
    """
    batch = solver.batchsize_eval
    num_batches = min(len(rows) // batch, solver.max_eval_batches)
    part = rows[: num_batches * batch]
    judged = scores[: len(part)]
    expected = roc_auc(part.labels, judged) if num_batches and np.isfinite(judged).all() else None
    if expected is None:
        logger.warning(
            "hugectr's own AUC is not compared: %d rows make %d evaluation batches of %d, or lack clicks, rows without "
            "one, or finite scores",
            len(rows), num_batches, batch,
        )  # fmt: skip
        return
    stage = write_stage(
        part,
        np.arange(len(part)),
        batch_size=batch,
        num_files=solver.num_gpus,
        folder=folder,
        group_rows=group_rows,
    )
    try:
        model.get_data_reader_eval().set_source(str(stage.file_list))
        while model.eval():
            pass
        found = dict(model.get_eval_metrics())["AUC"]
    except RuntimeError as error:
        raise PermanentError(f"HugeCTR cannot evaluate: {error}") from error
    if not abs(found - expected) <= solver.auc_tolerance:
        raise PermanentError(
            f"HugeCTR's AUC on {len(part)} rows is {found:.5f}, expected that of its saved files, {expected:.5f}, "
            f"within {solver.auc_tolerance}: the files do not mean what they are taken for"
        )
    logger.info("hugectr's AUC on %d rows is %.5f, that of its files %.5f", len(part), found, expected)
