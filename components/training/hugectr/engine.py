"""The HugeCTR engine: one `hugectr.Model` per restored weights and batch size, fed with staged Parquet.

Between models, and for scoring and saving, the weights live in a folder of their own as the store has them; HugeCTR's
own state is only what it has learned since. What a step computes is HugeCTR's; which rows are learned, in which order
and how often is `fit`'s. Dropout is seeded by HugeCTR itself, with 0 in every model, so the seed of a call decides
nothing here.

HugeCTR reports failed reads and writes in its log, if at all, and goes on. So what it loaded is saved and compared, and
what it saved is checked before it is taken for a model.
"""

import gc
import importlib
import logging
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.training.engine import Rate
from components.training.hugectr.embeddings import embeddings_of
from components.training.hugectr.files import (
    DENSE_FILE,
    DENSE_OPTIMIZER_FILE,
    SPARSE_FOLDER,
    SPARSE_OPTIMIZER_FILE,
    export_model,
    import_model,
)
from components.training.hugectr.layers import MODEL_NAME, Blueprint
from components.training.hugectr.nodes import built, communicator
from components.training.hugectr.staging import Stage, full_batches, staged
from components.training.rows import Rows, open_rows
from evergreen.config.features import Places
from evergreen.config.model import DcnConfig, NetworkConfig
from evergreen.config.training import TrainingSettings
from evergreen.networks.files import StoredModel, one_each, open_model
from evergreen.networks.scoring import load_scorer
from evergreen.runtime.errors import ContractError, PermanentError

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
    open_rows = staticmethod(open_rows)

    def __init__(
        self,
        config: NetworkConfig,
        slot_sizes: list[int],
        settings: TrainingSettings,
        *,
        places: Places | None = None,
        num_gpus: int = 1,
        nodes: Any | None = None,
        scratch: Path | None = None,
    ) -> None:
        """Makes an engine without weights; `restore` gives it some.

        Without `places` a row looks every slot up once.
        `num_gpus` of each of the `nodes` share a batch, those of the lowest numbers; None = the nodes that MPI started,
        or this machine.
        `scratch` is a folder for weights and staged rows: four times the model and its state, and 264 bytes per row of
        three stages; None = a new one where temporary files go.

        Raises:
            ContractError: settings that exclude each other.
            PermanentError: `hugectr` cannot be imported here.
        """
        if not isinstance(config, DcnConfig):
            raise ContractError(f"network is {config.network!r}, expected dcn: backend hugectr builds no other")
        self._nodes = communicator() if nodes is None else nodes
        self._num_nodes = 1 if self._nodes is None else self._nodes.Get_size()
        self._num_gpus = num_gpus * self._num_nodes
        _require_settings(settings, self._num_gpus)
        try:
            self._hugectr = importlib.import_module("hugectr")
        except ImportError as error:
            raise PermanentError(f"backend hugectr runs in the image {IMAGE} only: {error}") from error
        self._config = config
        self._slot_sizes = list(slot_sizes)
        self._settings = settings
        self._places = places or one_each(slot_sizes)
        self._embeddings = embeddings_of(config, slot_sizes, self._places)
        if scratch is not None:
            scratch.mkdir(parents=True, exist_ok=True)
        self._scratch = Path(tempfile.mkdtemp(prefix="hugectr-", dir=scratch))
        self._current, self._is_current = self._scratch / "current", False
        self._running: _Running | None = None
        self._num_folders = 0
        self.num_steps = 0

    def restore(self, weights: Path) -> None:
        """See `Engine`. HugeCTR gets the weights when it next learns."""
        stored = open_model(weights, self._slot_sizes)
        # HugeCTR takes weights of any network that are as many.
        load_scorer(weights, self._config, self._slot_sizes, places=self._places)
        self._end_model()
        self._renew_current(lambda folder: shutil.copytree(weights, folder))
        self.num_steps = stored.step

    def save(self, folder: Path) -> None:
        """See `Engine`."""
        self._bring_current()
        shutil.copytree(self._current, folder, dirs_exist_ok=True)

    def segment_batches(self, batch_size: int) -> int:
        """See `Engine`."""
        return max(1, self._settings.solver.stage_rows // batch_size) * _SEGMENT_STAGES

    def learn(
        self, rows: Rows, order: NDArray[np.int64], *, batch_size: int, seed: int, rate: Rate | None = None
    ) -> float:
        """See `Engine`; the mean loss is that of the batches looked at, one in `loss_interval` and the last.

        A last batch that is not whole is filled up with rows from the beginning of `order`, and a batch size that the
        GPUs cannot share is rounded down, for HugeCTR takes neither.
        """
        gpus = self._num_gpus
        per_step = max(gpus, batch_size - batch_size % gpus)
        if self._running is not None and self._running.batch_size != per_step:
            self._bring_current()
            self._end_model()
        self._num_folders += 1
        folder = self._scratch / f"rows-{self._num_folders:06d}"
        stages = staged(
            rows,
            full_batches(order, per_step),
            embeddings=self._embeddings,
            batch_size=per_step,
            num_files=gpus // self._num_nodes,  # all nodes read all of them
            stage_rows=self._settings.solver.stage_rows,
            folder=folder,
        )
        losses: list[float] = []
        for stage in stages:
            for loss in self._train(stage, per_step, rate or (lambda step: self._settings.learning_rate)):
                if not math.isfinite(loss):
                    return loss
                losses.append(loss)
            self._forget(stage)
        return float(np.mean(losses))

    def score(self, rows: Rows) -> NDArray[np.float32]:
        """See `Engine`."""
        self._bring_current()
        scorer = load_scorer(self._current, self._config, self._slot_sizes, places=self._places)
        probabilities: NDArray[np.float32] = scorer.probabilities(rows.dense, rows.ids)
        return probabilities

    def close(self) -> None:
        """See `Engine`."""
        self._end_model()
        if self._nodes is not None:
            self._nodes.bcast(None)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _train(self, stage: Stage, batch_size: int, rate: Rate) -> Iterator[float]:
        """Steps through one stage; yields the loss of every batch that is looked at."""
        if self._running is not None and not self._running.stage.has_room_for(stage):
            self._bring_current()
            self._end_model()
        running = self._running or self._begin_model(stage, batch_size)
        self._is_current = False
        try:
            running.reader.set_source(str(stage.file_list))
            for number in range(stage.num_batches):
                step = self.num_steps + 1
                correction = rate_correction(self._settings, step=step, model_step=running.steps + 1)
                running.model.set_learning_rate(rate(step) * correction)
                if not running.model.train():
                    raise PermanentError(
                        f"HugeCTR ended {stage.file_list} after {number} batches, expected {stage.num_batches}"
                    )
                running.steps += 1
                self.num_steps += 1
                if (number + 1) % self._settings.solver.loss_interval == 0 or number + 1 == stage.num_batches:
                    yield float(running.model.get_current_loss())
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
            embeddings=self._embeddings,
            settings=self._settings,
            num_gpus=self._num_gpus,
            num_nodes=self._num_nodes,
            batch_size=batch_size,
            file_list=str(stage.file_list),
        )
        if not self._current.exists():
            raise PermanentError("engine has no weights, expected a call of restore before learn")
        workspaces = ", ".join(f"{each.workspace_mb(self._num_gpus)} MiB" for each in self._embeddings)
        try:
            model, reader = built(self._hugectr, blueprint, self._nodes)
        except RuntimeError as error:
            said = f"workspaces of {workspaces} per GPU"
            raise PermanentError(f"HugeCTR cannot build the network with {said}: {error}") from error
        self._load(model)
        self._running = _Running(
            model=model,
            reader=reader,
            batch_size=batch_size,
            steps=0,
            stage=stage,
        )
        if self._settings.solver.prove_restores:
            proof = self._scratch / "proof"
            self._save_to(proof)
            current, saved = (open_model(folder, self._slot_sizes) for folder in (self._current, proof))
            _require_same(current, saved)
            shutil.rmtree(proof)
        logger.info("hugectr model: batches of %d, workspaces of %s per GPU", batch_size, workspaces)
        return self._running

    def _end_model(self) -> None:
        if self._running is None:
            return
        folder, self._running = self._running.stage.file_list.parent, None
        # Its GPU memory goes with the object.
        gc.collect()
        shutil.rmtree(folder, ignore_errors=True)

    def _bring_current(self) -> None:
        """Makes the folder of current weights hold what was learned."""
        if not self._is_current:
            if self._running is None:
                raise PermanentError("engine has no weights, expected a call of restore first")
            self._renew_current(self._save_to)

    def _load(self, model: Any) -> None:
        """Gives a compiled model the current weights, and the optimizer state where there is any."""
        stored, folder = open_model(self._current, self._slot_sizes), self._scratch / "load"
        try:
            export_model(stored, self._config, self._embeddings, num_gpus=self._num_gpus, folder=folder)
            model.load_dense_weights(str(folder / DENSE_FILE))
            # The overloads that take lists: given names, load_sparse_optimizer_states opens the name as a path.
            model.load_sparse_weights(self._sparse_paths(folder, SPARSE_FOLDER))
            if stored.moments is not None:
                model.load_dense_optimizer_states(str(folder / DENSE_OPTIMIZER_FILE))
                model.load_sparse_optimizer_states(self._sparse_paths(folder, SPARSE_OPTIMIZER_FILE))
        except (OSError, RuntimeError) as error:
            raise PermanentError(f"HugeCTR cannot load {self._current}: {error}") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _sparse_paths(self, folder: Path, name: str) -> list[str]:
        """Of each embedding, in the order in which they were added."""
        return [str(folder / name.format(each.number)) for each in self._embeddings]

    def _save_to(self, target: Path) -> None:
        """Saves the running model into `target`, as the store has it."""
        assert self._running is not None
        # Made empty first: HugeCTR writes over older files without cutting them off.
        folder = self._scratch / "saved"
        shutil.rmtree(folder, ignore_errors=True)
        success = self._hugectr.Error_t.Success
        try:
            folder.mkdir(parents=True)
            answer = self._running.model.save_params_to_files(prefix=str(folder / MODEL_NAME), iter=0)
            if answer is not None and answer != success:
                raise PermanentError(f"HugeCTR answers {answer} to saving to {folder}, expected {success}")
            import_model(
                folder,
                self._config,
                self._embeddings,
                num_gpus=self._num_gpus,
                into=target,
                step=self.num_steps,
            )
        except ContractError as error:
            raise PermanentError(f"what HugeCTR saved is no model: {error}") from error
        except (OSError, RuntimeError) as error:
            raise PermanentError(f"HugeCTR cannot save to {folder}: {error}") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _renew_current(self, write: Callable[[Path], object]) -> None:
        fresh = self._scratch / "fresh"
        shutil.rmtree(fresh, ignore_errors=True)
        write(fresh)
        shutil.rmtree(self._current, ignore_errors=True)
        fresh.rename(self._current)
        self._is_current = True


def _require_same(loaded: StoredModel, saved: StoredModel) -> None:
    """Refuses a model that, saved right after loading and before any step, is not the one that was loaded."""
    for kind, mine, its in zip(("weights", "Adam's m", "Adam's v"), loaded.parts, saved.parts):
        names = [name for name, values in mine.dense.items() if not np.array_equal(values, its.dense[name])]
        names += ["the embeddings"] * (not all(map(np.array_equal, mine.tables, its.tables)))
        if names:
            raise PermanentError(
                f"HugeCTR holds other {kind} of {', '.join(names)} than those that it was to load; its log names what "
                "it skipped"
            )


def _require_settings(settings: TrainingSettings, num_gpus: int) -> None:
    """Refuses what HugeCTR would refuse after minutes, or would not."""
    if settings.precision == "bfloat16":
        raise ContractError("precision is 'bfloat16', expected float32 or tf32")
    if settings.batch_size % num_gpus:
        raise ContractError(f"batch_size is {settings.batch_size}, expected a multiple of {num_gpus} GPUs")


def rate_correction(settings: TrainingSettings, *, step: int, model_step: int) -> float:
    """What the learning rate of step `step` of all rounds, its model's own step `model_step`, is multiplied by.

    HugeCTR's count of steps, Adam's t, starts anew with every model, which is made whenever weights are restored or the
    batch size changes, and HugeCTR does not save it. Its step is `w -= lr * c(t) * m / (sqrt(v) + eps)` with `c(t) =
    sqrt(1 - beta2^t) / (1 - beta1^t)`; t enters nowhere else, for dense parameters and embeddings alike. Giving it
    `lr * c(T) / c(t)`, with T the steps since the weights were initialised, therefore makes exactly the step of an Adam
    that never forgot its count.
    """
    now, forgotten = ((1 - settings.beta2**t) ** 0.5 / (1 - settings.beta1**t) for t in (step, model_step))
    return float(now / forgotten)
