"""The HugeCTR engine: a `hugectr.Model` that is trained on staged Parquet files.

A new model is created after weights are restored and when the batch size changes. The engine writes
the weights to a folder in the registry's layout before it scores, saves, or replaces the model.
Changes since the last write of that folder are only in HugeCTR's own memory. `fit` decides which
rows are used, in which order and how often. HugeCTR seeds dropout itself, with 0 in every model, so
the seed of a call has no effect here.

HugeCTR only logs failed reads and writes, and continues. HugeCTR does not even notice some
failures. Therefore loaded weights are saved again and compared. Saved weights are checked before
they are used as a model. Other errors abort the process, or the call does not return (`guard`).
"""

import gc
import importlib
import logging
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.training.device_memory import free_memory
from components.training.engine import Rate
from components.training.hugectr.embeddings import (
    Embedding,
    embeddings_of,
    max_vocabulary_size,
)
from components.training.hugectr.files import (
    DENSE_FILE,
    DENSE_OPTIMIZER_FILE,
    SPARSE_FOLDER,
    SPARSE_OPTIMIZER_FILE,
    export_model,
    import_model,
)
from components.training.hugectr.guard import bounded
from components.training.hugectr.layers import MODEL_NAME, Blueprint, padded
from components.training.hugectr.nodes import HUGECTR_ERRORS, built, communicator
from components.training.hugectr.staging import Stage, full_batches, staged
from components.training.rows import Rows, open_rows
from evergreen.config.features import FeaturePositions
from evergreen.config.model import DcnConfig, NetworkConfig
from evergreen.config.training import TrainingSettings
from evergreen.networks.files import StoredModel, one_id_per_slot, open_model
from evergreen.networks.scoring import load_scorer
from evergreen.runtime.errors import ContractError, PermanentError, first_line

logger = logging.getLogger(__name__)

_IMAGE = "evergreen-training-hugectr (components/training/Dockerfile.hugectr)"
_SEGMENT_STAGES = 8
"""Stages in one call of `train`. A stage is written while HugeCTR trains on the previous stage.
Before scoring, the whole table is saved, so a call of `train` should be long."""
_MAX_MESSAGE_BYTES = (1 << 31) - 1
"""Maximum length of a message of MPI, whose lengths are 32-bit integers. For each embedding,
HugeCTR sends one of Adam's two moments for all GPUs of a node in a single message."""


@dataclass(kw_only=True)
class _Running:
    """A model in training."""

    model: Any
    reader: Any
    batch_size: int
    steps: int
    """Number of steps of this model so far."""
    stage: Stage
    """Stage for which the model's readers were created."""


class HugectrEngine:
    """Implementation of `components.training.engine.Engine` with HugeCTR."""

    backend = "hugectr"
    open_rows = staticmethod(open_rows)

    def __init__(
        self,
        config: NetworkConfig,
        slot_sizes: list[int],
        settings: TrainingSettings,
        *,
        positions: FeaturePositions | None = None,
        num_gpus: int = 1,
        nodes: Any | None = None,
        scratch: Path | None = None,
    ) -> None:
        """Create an engine without weights. `restore` loads weights.

        Args:
            config: Configuration of the network.
            slot_sizes: Number of ids of each slot.
            settings: Settings of the fit.
            positions: Slot of each categorical position, and the positions of each list. If
                `positions` is None, a row looks up each slot once.
            num_gpus: GPUs of each node that share a batch. The node's first GPUs are used.
            nodes: MPI communicator of the nodes. If None, the engine uses the nodes of all MPI
                processes, or only this machine without MPI.
            scratch: Folder for weights and staged rows. The folder needs four times the disk space
                of the model with its state, and 264 bytes for each row of three stages. None for a
                new temporary folder. Several nodes need a folder that all nodes see.

        Raises:
            ContractError: the settings contradict each other, HugeCTR cannot read paths in the
                folder, or a table is too large for several nodes.
            PermanentError: `hugectr` cannot be imported here.
        """
        if not isinstance(config, DcnConfig):
            raise ContractError(
                f"network is {config.network!r}, expected dcn, the only network of backend hugectr"
            )
        self._nodes = communicator() if nodes is None else nodes
        self._num_nodes = 1 if self._nodes is None else self._nodes.Get_size()
        self._num_gpus = num_gpus * self._num_nodes
        _require_settings(settings, self._num_gpus)
        try:
            self._hugectr = importlib.import_module("hugectr")
        except ImportError as error:
            raise PermanentError(
                f"backend hugectr only runs in the image {_IMAGE}: {error}"
            ) from error
        self._config = config
        self._slot_sizes = list(slot_sizes)
        self._settings = settings
        self._positions = positions or one_id_per_slot(slot_sizes)
        self._embeddings = embeddings_of(config, slot_sizes, self._positions)
        if self._num_nodes > 1:
            _require_messages(self._embeddings, num_gpus, self._num_gpus)
        parent = (Path(tempfile.gettempdir()) if scratch is None else scratch).absolute()
        if ":" in str(parent):
            raise ContractError(
                f"folder of temporary files is {parent}, expected a path without ':', because "
                "HugeCTR cannot find files in such a folder"
            )
        parent.mkdir(parents=True, exist_ok=True)
        self._scratch = Path(tempfile.mkdtemp(prefix="hugectr-", dir=parent))
        self._current, self._is_current = self._scratch / "current", False
        self._running: _Running | None = None
        self._minutes = settings.solver.call_minutes
        self._num_folders = 0
        self.num_steps = 0

    def restore(self, weights: Path) -> None:
        """See `Engine`. The next call of `train` copies the weights to HugeCTR."""
        stored = open_model(weights, self._slot_sizes)
        # HugeCTR accepts the weights of any network with the same number of parameters, so the
        # weights are checked here.
        load_scorer(weights, self._config, self._slot_sizes, positions=self._positions)
        self._end_model()
        self._replace_current(lambda folder: shutil.copytree(weights, folder))
        self.num_steps = stored.step

    def save(self, folder: Path) -> None:
        """See `Engine`."""
        self._update_current()
        shutil.copytree(self._current, folder, dirs_exist_ok=True)

    def segment_batches(self, batch_size: int) -> int:
        """See `Engine`."""
        return max(1, self._settings.solver.stage_rows // batch_size) * _SEGMENT_STAGES

    def train(
        self,
        rows: Rows,
        order: NDArray[np.int64],
        *,
        batch_size: int,
        seed: int,
        rate: Rate | None = None,
    ) -> float:
        """See `Engine`.

        The mean loss is over every `loss_interval`-th batch and the last batch of each stage.

        HugeCTR needs full batches whose size is a multiple of the number of GPUs. An incomplete
        last batch is filled with rows from the start of `order`, and the batch size is rounded
        down.
        """
        gpus = self._num_gpus
        per_step = max(gpus, batch_size - batch_size % gpus)
        if self._running is not None and self._running.batch_size != per_step:
            self._update_current()
            self._end_model()
        self._num_folders += 1
        folder = self._scratch / f"rows-{self._num_folders:06d}"
        stages = staged(
            rows,
            full_batches(order, per_step),
            embeddings=self._embeddings,
            batch_size=per_step,
            num_files=gpus // self._num_nodes,  # every node reads all files
            stage_rows=self._settings.solver.stage_rows,
            folder=folder,
            num_zeros=padded(self._config).num_dense - self._config.num_dense,
        )
        losses: list[float] = []
        for stage in stages:
            for loss in self._train(
                stage, per_step, rate or (lambda step: self._settings.learning_rate)
            ):
                if not math.isfinite(loss):
                    return loss
                losses.append(loss)
            self._delete_stage(stage)
        return float(np.mean(losses))

    def score(self, rows: Rows) -> NDArray[np.float32]:
        """See `Engine`."""
        self._update_current()
        scorer = load_scorer(
            self._current, self._config, self._slot_sizes, positions=self._positions
        )
        probabilities: NDArray[np.float32] = scorer.probabilities(rows.dense, rows.ids)
        return probabilities

    def close(self) -> None:
        """See `Engine`."""
        # After an error, other nodes may hang in a call, and `_end_model` would wait for them.
        # Therefore `_end_model` is not called, and `run_together` ends all processes.
        if self._nodes is None or sys.exc_info()[0] is None:
            self._end_model()
            if self._nodes is not None:
                self._nodes.bcast(None)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _train(self, stage: Stage, batch_size: int, rate: Rate) -> Iterator[float]:
        """Train on one stage and yield the losses that are read from HugeCTR."""
        if self._running is not None and not self._running.stage.has_room_for(stage):
            self._update_current()
            self._end_model()
        running = self._running or self._begin_model(stage, batch_size)
        self._is_current = False
        try:
            with bounded(self._minutes) as restart:
                # The reader of a new model was created for the first stage, so only later stages
                # need `set_source`.
                if stage is not running.stage:
                    running.reader.set_source(str(stage.file_list))
                for number in range(stage.num_batches):
                    self._step(running, rate, stage=stage, number=number)
                    if (
                        number + 1
                    ) % self._settings.solver.loss_interval == 0 or number + 1 == stage.num_batches:
                        yield self._loss(running)
                        restart()
                # The reader must report the end of its files before it can restart.
                if running.model.train():
                    raise PermanentError(
                        f"HugeCTR read more than {stage.num_batches} batches from "
                        f"{stage.file_list}, expected {stage.num_batches}"
                    )
        except HUGECTR_ERRORS as error:
            raise PermanentError(
                f"HugeCTR stopped at step {self.num_steps + 1} with {self._sizes(batch_size)} "
                f"(free memory: {free_memory()}): {first_line(error)}; HugeCTR's log names the "
                "reason"
            ) from error

    def _step(self, running: _Running, rate: Rate, *, stage: Stage, number: int) -> None:
        """Take one optimizer step on the batch at position `number` of the stage.

        Positions start at 0.
        """
        step = self.num_steps + 1
        correction = _rate_correction(self._settings, step=step, model_step=running.steps + 1)
        running.model.set_learning_rate(rate(step) * correction)
        if not running.model.train():
            raise PermanentError(
                f"HugeCTR ended {stage.file_list} after {number} batches, expected "
                f"{stage.num_batches}"
            )
        running.steps += 1
        self.num_steps += 1

    def _loss(self, running: _Running) -> float:
        loss = float(running.model.get_current_loss())
        if loss == 0:
            raise PermanentError(
                f"HugeCTR's loss at step {self.num_steps} is 0, expected a positive number: "
                "HugeCTR returns 0 after an error, which HugeCTR's log names"
            )
        return loss

    def _delete_stage(self, stage: Stage) -> None:
        """Delete a stage after training, unless it is the first stage of the current model."""
        if self._running is None or stage is not self._running.stage:
            shutil.rmtree(stage.file_list.parent, ignore_errors=True)

    def _begin_model(self, stage: Stage, batch_size: int) -> _Running:
        """Create a model with the current weights, and verify that HugeCTR loaded them."""
        blueprint = Blueprint(
            config=padded(self._config),
            embeddings=self._embeddings,
            settings=self._settings,
            num_gpus=self._num_gpus,
            num_nodes=self._num_nodes,
            batch_size=batch_size,
            file_list=str(stage.file_list),
        )
        if not self._current.exists():
            raise PermanentError("engine has no weights, expected a call of restore before train")
        try:
            with bounded(self._minutes):
                model, reader = built(self._hugectr, blueprint, self._nodes)
        except HUGECTR_ERRORS as error:
            raise PermanentError(
                f"HugeCTR cannot build the network with {self._sizes(batch_size)} (free "
                f"memory: {free_memory()}): {first_line(error)}; HugeCTR's log names the reason"
            ) from error
        with bounded(self._minutes):
            self._load(model)
        self._running = _Running(
            model=model,
            reader=reader,
            batch_size=batch_size,
            steps=0,
            stage=stage,
        )
        if self._settings.solver.prove_restores:
            copy = self._scratch / "copy"
            self._save_to(copy)
            current, saved = (
                open_model(folder, self._slot_sizes) for folder in (self._current, copy)
            )
            _require_same(current, saved)
            shutil.rmtree(copy)
        logger.info("hugectr model: %s", self._sizes(batch_size))
        return self._running

    def _sizes(self, batch_size: int) -> str:
        """Return a description of what takes memory on a GPU."""
        workspaces = [f"{each.workspace_mb(self._num_gpus)} MiB" for each in self._embeddings]
        return f"batches of {batch_size} rows and workspaces of {', '.join(workspaces)} per GPU"

    def _end_model(self) -> None:
        if self._running is None:
            return
        folder, self._running = self._running.stage.file_list.parent, None
        with bounded(self._minutes):
            # The garbage collection of the model releases its GPU memory.
            gc.collect()
        shutil.rmtree(folder, ignore_errors=True)

    def _update_current(self) -> None:
        """Write the trained weights to the folder of current weights."""
        if not self._is_current:
            if self._running is None:
                raise PermanentError("engine has no weights, expected a call of restore first")
            self._replace_current(self._save_to)

    def _load(self, model: Any) -> None:
        """Load the current weights, and any optimizer state, into a compiled model."""
        stored, folder = open_model(self._current, self._slot_sizes), self._scratch / "load"
        try:
            export_model(
                stored, self._config, self._embeddings, num_gpus=self._num_gpus, folder=folder
            )
            model.load_dense_weights(str(folder / DENSE_FILE))
            # This module passes lists to HugeCTR's functions. If `load_sparse_optimizer_states`
            # gets names instead, it opens a name as if the name were a path.
            model.load_sparse_weights(self._sparse_paths(folder, SPARSE_FOLDER))
            if stored.moments is not None:
                model.load_dense_optimizer_states(str(folder / DENSE_OPTIMIZER_FILE))
                model.load_sparse_optimizer_states(
                    self._sparse_paths(folder, SPARSE_OPTIMIZER_FILE)
                )
        except (OSError, *HUGECTR_ERRORS) as error:
            raise PermanentError(
                f"HugeCTR cannot load {self._current}: {first_line(error)}"
            ) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _sparse_paths(self, folder: Path, name: str) -> list[str]:
        """Return the path of each embedding, in the order in which they were added."""
        return [str(folder / name.format(each.number)) for each in self._embeddings]

    def _save_to(self, target: Path) -> None:
        """Save the running model into `target` in the registry's layout."""
        assert self._running is not None
        # The folder must be empty, because HugeCTR overwrites older files without truncating them.
        folder = self._scratch / "saved"
        shutil.rmtree(folder, ignore_errors=True)
        success = self._hugectr.Error_t.Success
        try:
            folder.mkdir(parents=True)
            with bounded(self._minutes):
                answer = self._running.model.save_params_to_files(
                    prefix=str(folder / MODEL_NAME), iter=0
                )
            if answer is not None and answer != success:
                raise PermanentError(
                    f"HugeCTR's save to {folder} returned {answer}, expected {success}"
                )
            import_model(
                folder,
                self._config,
                self._embeddings,
                num_gpus=self._num_gpus,
                into=target,
                step=self.num_steps,
            )
        except ContractError as error:
            raise PermanentError(f"HugeCTR saved an invalid model: {error}") from error
        except (OSError, *HUGECTR_ERRORS) as error:
            raise PermanentError(f"HugeCTR cannot save to {folder}: {first_line(error)}") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _replace_current(self, write: Callable[[Path], object]) -> None:
        fresh = self._scratch / "fresh"
        shutil.rmtree(fresh, ignore_errors=True)
        write(fresh)
        shutil.rmtree(self._current, ignore_errors=True)
        fresh.rename(self._current)
        self._is_current = True


def _require_same(loaded: StoredModel, saved: StoredModel) -> None:
    """Check that a loaded model did not change when it was saved again."""
    for kind, mine, its in zip(("weights", "Adam's m", "Adam's v"), loaded.parts, saved.parts):
        names = [
            name
            for name, values in mine.dense.items()
            if not np.array_equal(values, its.dense[name])
        ]
        names += ["the embeddings"] * (not all(map(np.array_equal, mine.tables, its.tables)))
        if names:
            raise PermanentError(
                f"{kind} of {', '.join(names)} changed when HugeCTR loaded and saved them, "
                "expected equal values; HugeCTR's log names the parameters that it skipped"
            )


def _require_settings(settings: TrainingSettings, num_gpus: int) -> None:
    """Check settings that HugeCTR would reject only after minutes, or would not reject at all."""
    if settings.precision == "bfloat16":
        raise ContractError("precision is 'bfloat16', expected float32 or tf32")
    if settings.batch_size % num_gpus:
        raise ContractError(
            f"batch_size is {settings.batch_size}, expected a multiple of {num_gpus} GPUs"
        )


def _require_messages(embeddings: Sequence[Embedding], gpus_of_node: int, num_gpus: int) -> None:
    """Check that HugeCTR can send Adam's moments from node to node."""
    for each in embeddings:
        rows = max_vocabulary_size(each.workspace_mb(num_gpus), each.width)
        if (found := 4 * gpus_of_node * rows * each.width) > _MAX_MESSAGE_BYTES:
            raise ContractError(
                f"each of Adam's moments for {each.num_keys} ids of width {each.width} on "
                f"{num_gpus} GPUs has {found} bytes on a node, expected at most "
                f"{_MAX_MESSAGE_BYTES}, the limit of an MPI message between nodes; use more "
                "nodes, a single node, or backend torchrec"
            )


def _rate_correction(settings: TrainingSettings, *, step: int, model_step: int) -> float:
    """Return a factor for the learning rate.

    The factor corrects the effect of HugeCTR's step count.

    HugeCTR restarts its step count (Adam's t) with every model and does not save it. A new model is
    created whenever weights are restored or the batch size changes. HugeCTR's step is `w -= lr *
    c(t) * m / (sqrt(v) + eps)` with `c(t) = sqrt(1 - beta2^t) / (1 - beta1^t)`. Both for dense
    parameters and for embeddings, HugeCTR uses t only in this formula. Let T be the number of steps
    since the weights were initialised. With the learning rate `lr * c(T) / c(t)`, HugeCTR takes
    exactly the step of an Adam with step count T.

    Args:
        settings: Settings of the fit.
        step: Step number over all runs, T.
        model_step: Step number of this model, t.
    """
    now, forgotten = (
        (1 - settings.beta2**t) ** 0.5 / (1 - settings.beta1**t) for t in (step, model_step)
    )
    return float(now / forgotten)
