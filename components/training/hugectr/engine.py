"""The HugeCTR engine: one `hugectr.Model` per restored weights and batch size, fed with staged Parquet.

Between models, and for scoring and saving, the weights live in a folder of their own in our form; HugeCTR's own state
is only what it has learnt since. What a step computes is HugeCTR's; which rows are learnt, in which order and how often
is `fit`'s. Dropout is seeded by HugeCTR itself, with 0 in every model, so the seed of a call decides nothing here.
"""

from __future__ import annotations

import gc
import importlib
import logging
import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.contracts.criteo import CATEGORICAL, NUM_CATEGORICAL
from components.contracts.dcn import DcnConfig
from components.contracts.model_files import open_model
from components.runtime.errors import ContractError, PermanentError
from components.training.config import TrainingSettings
from components.training.engine import Learnt
from components.training.hugectr import loading, saving
from components.training.hugectr.cross_check import require_same_auc
from components.training.hugectr.graph import Blueprint, compiled_model
from components.training.hugectr.schedule import given_rate
from components.training.hugectr.scoring import score_files
from components.training.hugectr.settings import SolverSettings
from components.training.hugectr.staging import Stage, full_batches, staged
from components.training.hugectr.state_layout import StateLayout
from components.training.hugectr.workspace import GpuMemory, nvidia_smi_memory, plan_workspace
from components.training.rows import Rows

logger = logging.getLogger(__name__)

IMAGE = "evergreen-training-hugectr (components/training/Dockerfile.hugectr)"
_SEGMENT_STAGES = 8
"""Stages in one call of `learn`: writing one overlaps with training another, and a look at the scores between two calls
saves the whole table."""


@dataclass(kw_only=True)
class _Running:
    """A model under training."""

    model: Any
    reader: Any
    batch_size: int
    steps: int
    """Its own, from 0."""
    stage: Stage
    """The one that its readers were made for."""


class HugectrEngine:
    """Engine of `components.training.engine`, in HugeCTR."""

    backend = "hugectr"
    scores_cheaply = False  # it saves the whole table

    def __init__(
        self,
        config: DcnConfig,
        slot_sizes: list[int],
        settings: TrainingSettings,
        solver: SolverSettings | None = None,
        *,
        scratch: Path | None = None,
        gpu_memory: GpuMemory = nvidia_smi_memory,
    ) -> None:
        """Makes an engine without weights; `restore` gives it some.

        Args:
            config: Shape of the network.
            slot_sizes: Number of ids per categorical column, 26 of them.
            settings: Optimizer and precision.
            solver: HugeCTR's own settings; None = the defaults.
            scratch: Folder for weights and staged rows: four times the model and its state, and 264 bytes per row of
                three stages; None = a new one where temporary files go.
            gpu_memory: Asks for the GPUs' memory.

        Raises:
            ContractError: settings that exclude each other.
            PermanentError: `hugectr` cannot be imported here, or the table does not fit the GPUs.
        """
        solver = solver or SolverSettings()
        _check(slot_sizes, settings, solver)
        try:
            self._hugectr = importlib.import_module("hugectr")
        except ImportError as error:
            raise PermanentError(f"backend hugectr runs in the image {IMAGE} only: {error}") from error
        self._config, self._slot_sizes, self._settings, self._solver = config, list(slot_sizes), settings, solver
        self._layout = StateLayout(
            num_rows=sum(slot_sizes),
            dim=config.embedding_dim,
            num_gpus=solver.num_gpus,
            workspace_mb=plan_workspace(sum(slot_sizes), config.embedding_dim, solver, gpu_memory),
            half=solver.use_mixed_precision,
        )
        if scratch is not None:
            scratch.mkdir(parents=True, exist_ok=True)
        self._scratch = Path(tempfile.mkdtemp(prefix="hugectr-", dir=scratch))
        self._current, self._is_current, self._must_check = self._scratch / "current", False, False
        self._running: _Running | None = None
        self._num_folders = 0
        self.num_steps = 0

    def restore(self, weights: Path, num_steps: int) -> None:
        """See `Engine`. HugeCTR gets the weights when it next learns."""
        open_model(weights, self._config, self._slot_sizes)
        self._end_model()
        self._renew_current(lambda folder: loading.copy_whole(weights, folder, self._config, self._slot_sizes))
        self.num_steps, self._must_check = num_steps, False

    def save(self, folder: Path) -> None:
        """See `Engine`."""
        self._bring_current()
        shutil.copytree(self._current, folder, dirs_exist_ok=True)
        try:
            open_model(folder, self._config, self._slot_sizes)
        except ContractError as error:
            raise PermanentError(f"saved model is not whole: {error}") from error

    def segment_batches(self, batch_size: int) -> int:
        """See `Engine`."""
        return max(1, self._solver.stage_rows // batch_size) * _SEGMENT_STAGES

    def learn(self, rows: Rows, order: NDArray[np.int64], batch_size: int, seed: int) -> Learnt:
        """See `Engine`; the mean loss is that of the batches looked at, one in `loss_interval` and the last.

        A last batch that is not whole is filled up with rows from the beginning of `order`, and a batch size that the
        GPUs cannot share is rounded down, for HugeCTR takes neither.
        """
        if not len(order):
            return Learnt(mean_loss=0.0)
        gpus = self._solver.num_gpus
        per_step = max(gpus, batch_size - batch_size % gpus)
        if self._running is not None and self._running.batch_size != per_step:
            self._bring_current()
            self._end_model()
        folder = self._new_folder("rows")
        stages = staged(
            rows,
            full_batches(order, per_step),
            batch_size=per_step,
            num_files=gpus,
            stage_rows=self._solver.stage_rows,
            folder=folder,
        )
        losses: list[float] = []
        looked = 0
        for stage in stages:
            for batch, loss in self._train(stage, per_step):
                losses.append(loss)
                first, looked = looked, looked + batch
                if not math.isfinite(loss):
                    bad = range(first * per_step // batch_size, -(-looked * per_step // batch_size))
                    return Learnt(mean_loss=loss, bad_batches=bad)
            self._forget(stage)
        return Learnt(mean_loss=float(np.mean(losses)))

    def score(self, rows: Rows) -> NDArray[np.float32]:
        """See `Engine`."""
        self._bring_current()
        scores = score_files(self._current, self._config, self._slot_sizes, rows)
        if self._must_check and self._running is not None and self._solver.auc_tolerance:
            folder = self._new_folder("eval")
            require_same_auc(
                self._running.model,
                rows,
                scores,
                solver=self._solver,
                folder=folder,
                group_rows=self._running.stage.group_rows,
            )
            shutil.rmtree(folder, ignore_errors=True)
            self._must_check = False
        return scores

    def close(self) -> None:
        """See `Engine`."""
        self._end_model()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _train(self, stage: Stage, batch_size: int) -> Any:
        """Steps through one stage; yields batches since the last look at the loss, and that loss."""
        if self._running is not None and not self._running.stage.has_room_for(stage):
            self._bring_current()
            self._end_model()
        running = self._running or self._begin_model(stage, batch_size)
        self._is_current, self._must_check = False, True
        since = 0
        try:
            running.reader.set_source(str(stage.file_list))
            for number in range(stage.num_batches):
                rate = given_rate(self._settings, self._solver, step=self.num_steps + 1, model_step=running.steps + 1)
                running.model.set_learning_rate(rate)
                if not running.model.train():
                    raise PermanentError(
                        f"HugeCTR ended {stage.file_list} after {number} batches, expected {stage.num_batches}"
                    )
                running.steps, self.num_steps, since = running.steps + 1, self.num_steps + 1, since + 1
                if since == self._solver.loss_interval or number + 1 == stage.num_batches:
                    yield since, float(running.model.get_current_loss())
                    since = 0
            # The reader starts over only once it was seen to be at its end.
            if running.model.train():
                raise PermanentError(f"HugeCTR reads {stage.file_list} on after its {stage.num_batches} batches")
        except RuntimeError as error:
            raise PermanentError(f"HugeCTR stopped at step {self.num_steps + 1}: {error}") from error

    def _forget(self, stage: Stage) -> None:
        """Removes a stage that was trained, unless the model began with it: its reader was made for that folder."""
        if self._running is None or stage is not self._running.stage:
            shutil.rmtree(stage.file_list.parent, ignore_errors=True)

    def _begin_model(self, stage: Stage, batch_size: int) -> _Running:
        """A model with the current weights, proven to hold them."""
        blueprint = Blueprint(
            config=self._config,
            slot_sizes=self._slot_sizes,
            settings=self._settings,
            solver=self._solver,
            workspace_mb=self._layout.workspace_mb,
            batch_size=batch_size,
            file_list=str(stage.file_list),
        )
        if not self._current.exists():
            raise PermanentError("engine has no weights, expected a call of restore before learn")
        try:
            model = compiled_model(self._hugectr, blueprint)
        except RuntimeError as error:
            raise PermanentError(f"HugeCTR cannot build the network: {error}") from error
        loading.load(model, self._current, self._config, self._slot_sizes, self._layout, self._scratch / "load")
        self._running = _Running(
            model=model,
            reader=model.get_data_reader_train(),
            batch_size=batch_size,
            steps=0,
            stage=stage,
        )
        if self._solver.prove_restores:
            proof = self._scratch / "proof"
            self._save_to(proof)
            loading.require_same(self._current, proof, moments=not self._solver.use_mixed_precision)
            shutil.rmtree(proof)
        logger.info("hugectr model: batches of %d, workspace %d MiB per GPU", batch_size, self._layout.workspace_mb)
        return self._running

    def _end_model(self) -> None:
        if self._running is None:
            return
        folder, self._running = self._running.stage.file_list.parent, None
        # Its GPU memory goes with the object.
        gc.collect()
        shutil.rmtree(folder, ignore_errors=True)

    def _bring_current(self) -> None:
        """Makes the folder of current weights hold what was learnt."""
        if not self._is_current:
            if self._running is None:
                raise PermanentError("engine has no weights, expected a call of restore first")
            self._renew_current(self._save_to)

    def _save_to(self, folder: Path) -> None:
        assert self._running is not None
        saving.save(self._hugectr, self._running.model, folder, self._config, self._layout, self._scratch / "saved")

    def _renew_current(self, write: Callable[[Path], None]) -> None:
        fresh = self._scratch / "fresh"
        shutil.rmtree(fresh, ignore_errors=True)
        write(fresh)
        shutil.rmtree(self._current, ignore_errors=True)
        fresh.rename(self._current)
        self._is_current = True

    def _new_folder(self, kind: str) -> Path:
        self._num_folders += 1
        return self._scratch / f"{kind}-{self._num_folders:06d}"


def _check(slot_sizes: list[int], settings: TrainingSettings, solver: SolverSettings) -> None:
    """Refuses what HugeCTR would refuse after minutes, or would not."""
    if len(slot_sizes) != NUM_CATEGORICAL:
        raise ContractError(f"there are {len(slot_sizes)} slot sizes, expected {NUM_CATEGORICAL}")
    for name, size in zip(CATEGORICAL, slot_sizes):
        if size < 1:
            raise ContractError(f"slot size of {name} is {size}, expected at least 1")
    if settings.precision == "bfloat16":
        raise ContractError("precision is 'bfloat16', expected float32 or tf32; HugeCTR's own is use_mixed_precision")
    if settings.precision == "tf32" and solver.use_mixed_precision:
        raise ContractError("precision is 'tf32' with use_mixed_precision, expected one of the two")
    if settings.batch_size % solver.num_gpus:
        raise ContractError(f"batch_size is {settings.batch_size}, expected a multiple of {solver.num_gpus} GPUs")
    if solver.batchsize_eval % solver.num_gpus:
        raise ContractError(f"batchsize_eval is {solver.batchsize_eval}, expected a multiple of {solver.num_gpus} GPUs")
