"""The PyTorch backend: epochs over rows held in memory, early stopping on the newest of them, checkpoints.

An incremental round exists because the world may have changed, most likely within its window. Fitting the whole window
then teaches the old world once more: with the newest third changed, that regained 20 % of the AUC lost, fitting the
newest eighth alone 70 %; in an unchanged world the whole window is best. So a round fits several parts ("branches": the
newest 1, 1/2, 1/4, ... of the rows), each from the parent, and the slice of the very newest rows chooses.

Runs on a GPU where there is one, else on the CPU, where equal input gives equal bits. The arithmetic of a step is
`components.dcn`'s and `optimizers`'; what a model in the store consists of is `publish`'s.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from components.contracts.errors import ContractError, PermanentError
from components.contracts.metrics import log_loss, roc_auc, row_log_losses
from components.contracts.uris import local_path
from components.dcn.network import predict
from components.training import checkpoint as checkpoints
from components.training.checkpoint import Checkpoint, Moment
from components.training.initial import initial_weights
from components.training.metrics_sink import MetricsSink
from components.training.rows import Rows, read_rows
from components.training.stepper import Stepper
from components.training.trainer import FitJob, FitResult, Start

logger = logging.getLogger(__name__)

_CHECK_EVERY = 64
"""Batches between looks at the loss: a look makes a GPU wait."""
_SAY_EVERY_SECONDS = 30.0


class PytorchTrainer:
    """Trainer of `components.training.trainer`, in PyTorch."""

    backend = "pytorch"

    def __init__(
        self, sink: MetricsSink, *, device: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Makes a trainer.

        Args:
            sink: Takes the numbers of each epoch.
            device: Torch's name of the device; None = the GPU where there is one.
            clock: Seconds, for the reported speed.
        """
        self._sink, self._clock = sink, clock
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def fit(self, job: FitJob) -> FitResult:
        """See `Trainer`."""
        # Dropout draws from torch's global generator, which stays the caller's.
        with torch.random.fork_rng():
            return _Fit(job, self._sink, self._device, self._clock).run()


def _split(job: FitJob) -> tuple[Rows, Rows]:
    """Rows to fit, and the newest rows, which judge."""
    manifest = job.training_set
    rows = read_rows(local_path(manifest.train_uri), manifest.num_train_rows, manifest.slot_sizes)
    num_stopping = max(1, round(len(rows) * job.settings.stopping_fraction))
    fitted, stopping = rows[: len(rows) - num_stopping], rows[len(rows) - num_stopping :]
    num_clicks = int(fitted.labels.sum(dtype=np.float64))
    if num_clicks in (0, len(fitted)):
        raise ContractError(
            f"labels of the {len(fitted)} rows to fit hold {num_clicks} clicks, expected clicks and non-clicks"
        )
    return fitted, stopping


class _Fit:
    """One fit under way."""

    def __init__(self, job: FitJob, sink: MetricsSink, device: torch.device, clock: Callable[[], float]) -> None:
        self._job, self._settings, self._sink, self._device, self._clock = job, job.settings, sink, device, clock
        self._fitted, self._stopping = _split(job)
        self._stepper = Stepper(job.config, job.training_set.slot_sizes, job.settings, device)
        self._start = job.start
        self._last_branch = self._settings.num_halvings if job.start else 0
        self._rows_seen, self._seconds = 0, 0.0

    def run(self) -> FitResult:
        """Fits each branch until it stops, then finishes from the best weights of all."""
        path, config, slot_sizes = self._job.checkpoint_path, self._job.config, self._job.training_set.slot_sizes
        state = checkpoints.load(path, config, slot_sizes) or self._begin()
        self._stepper.restore(state.now.weights, state.now.step)
        while True:
            while not self._ended(state):
                state = self._epoch(state)
                checkpoints.save(path, config, state)
            if state.now.branch == self._last_branch:
                break
            state = self._begin_branch(state)
        return self._finish(state)

    def _begin(self) -> Checkpoint:
        """The state before the first epoch; a parent that no epoch betters stays the best."""
        if self._start is None:
            rate = float(self._fitted.labels.mean(dtype=np.float64))
            sizes, seed = self._job.training_set.slot_sizes, self._settings.seed
            weights = initial_weights(self._job.config, sizes, click_rate=rate, seed=seed)
            self._start = Start(weights=weights, optimizer_step=0)
        self._stepper.restore(self._start.weights, self._start.optimizer_step)
        logger.info("fit begins: %d rows on %s, %d rows judge", len(self._fitted), self._device, len(self._stopping))
        now = self._judge(0, 0, None)
        return Checkpoint(now=now, best=now, start_loss=_loss(now), branch_loss=_loss(now), stale=0)

    def _begin_branch(self, state: Checkpoint) -> Checkpoint:
        assert self._start is not None, "only an incremental round has several branches"
        self._stepper.restore(self._start.weights, self._start.optimizer_step)
        now = Moment(
            branch=state.now.branch + 1,
            epoch=0,
            step=self._start.optimizer_step,
            weights=self._start.weights,
            scores=state.now.scores,
            row_losses=state.now.row_losses,
        )
        return replace(state, now=now, branch_loss=state.start_loss, stale=0)

    def _epoch(self, state: Checkpoint) -> Checkpoint:
        branch, epoch = state.now.branch, state.now.epoch + 1
        rows = self._part(branch)
        training_loss = self._pass(rows, self._batch_size(rows), (branch, epoch))
        now = self._judge(branch, epoch, training_loss)
        better = _loss(now) < state.branch_loss
        return Checkpoint(
            now=now,
            best=now if now.is_better_than(state.best) else state.best,
            start_loss=state.start_loss,
            branch_loss=_loss(now) if better else state.branch_loss,
            stale=0 if better else state.stale + 1,
        )

    def _ended(self, state: Checkpoint) -> bool:
        most = self._settings.max_epochs * 2**state.now.branch
        return state.now.epoch >= most or state.stale > self._settings.patience

    def _finish(self, state: Checkpoint) -> FitResult:
        """The best weights, after the stopping slice was learnt from them."""
        best = state.best
        self._stepper.restore(best.weights, best.step)
        batch_size = self._batch_size(self._part(best.branch))
        for number in range(best.epoch if self._settings.finish else 0):
            self._pass(self._stopping, batch_size, (self._last_branch + 1, number))
        logger.info(
            "fit ends: best is epoch %d on the newest %d rows, log loss %.5f",
            best.epoch,
            len(self._part(best.branch)),
            _loss(best),
        )
        return FitResult(
            weights=self._stepper.weights(),
            optimizer_step=self._stepper.num_steps,
            early_stopping=best.scores,
            rows_per_second=self._rows_per_second(),
        )

    def _part(self, branch: int) -> Rows:
        """The fitted rows of a branch: the newest 1 / 2^branch."""
        return self._fitted[len(self._fitted) - max(1, len(self._fitted) >> branch) :]

    def _batch_size(self, rows: Rows) -> int:
        wanted = max(self._settings.min_batch_size, len(rows) // self._settings.min_steps)
        return min(self._settings.batch_size, wanted)

    def _rows_per_second(self) -> float | None:
        return self._rows_seen / self._seconds if self._seconds > 0 else None

    def _judge(self, branch: int, epoch: int, training_loss: float | None) -> Moment:
        """The network as it is, scored on the stopping slice."""
        probabilities = predict(self._stepper.network, self._stopping.dense, self._stopping.ids)
        scores = {
            "auc": roc_auc(self._stopping.labels, probabilities),
            "log_loss": log_loss(self._stopping.labels, probabilities),
        }
        speed = self._rows_per_second()
        step = self._stepper.num_steps
        self._sink.log_dict(
            {"branch": branch, "epoch": epoch, "training_loss": training_loss, **scores, "rows_per_second": speed}, step
        )
        said = [f"{name} {value:.5g}" for name, value in scores.items() if value is not None]
        said += [] if training_loss is None else [f"training loss {training_loss:.5f}", f"{speed or 0:,.0f} rows/s"]
        logger.info("newest %d rows, epoch %d: %s", len(self._part(branch)), epoch, ", ".join(said))
        return Moment(
            branch=branch,
            epoch=epoch,
            step=step,
            weights=self._stepper.weights(),
            scores=scores,
            row_losses=row_log_losses(self._stopping.labels, probabilities),
        )

    def _pass(self, rows: Rows, batch_size: int, place: tuple[int, int]) -> float:
        """One pass over `rows` in the order that `place` (branch, epoch) seeds; the mean loss of its batches."""
        branch, epoch = place
        seed = int(np.random.SeedSequence([self._settings.seed, branch, epoch]).generate_state(1)[0])
        torch.manual_seed(seed)
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(rows)))
        tensors = [torch.from_numpy(a) for a in (rows.labels, rows.dense, rows.ids)]
        batches = order.split(batch_size)
        losses = torch.zeros(len(batches), device=self._device)
        began = said = self._clock()
        self._stepper.network.train()
        for number, batch in enumerate(batches):
            labels_B, dense_BD, ids_BF = (t[batch].to(self._device) for t in tensors)
            losses[number] = self._stepper.step(labels_B, dense_BD, ids_BF.long())
            if (number + 1) % _CHECK_EVERY == 0 or number + 1 == len(batches):
                _check_finite(losses[: number + 1], epoch, batches)
                if self._clock() - said >= _SAY_EVERY_SECONDS:
                    said = self._clock()
                    logger.info("epoch %d: batch %d of %d", epoch, number + 1, len(batches))
        self._seconds += self._clock() - began
        self._rows_seen += len(rows)
        return float(losses.mean())


def _loss(moment: Moment) -> float:
    loss = moment.scores["log_loss"]
    assert loss is not None, "the stopping slice has at least one row"
    return loss


def _check_finite(losses: Tensor, epoch: int, batches: Sequence[Tensor]) -> None:
    finite = torch.isfinite(losses)
    if bool(finite.all()):
        return
    number = int(torch.argmin(finite.int()))
    rows = batches[number]
    raise PermanentError(
        f"loss is {float(losses[number])} at epoch {epoch}, batch {number + 1} of {len(batches)} ({len(rows)} rows, "
        f"among them rows {sorted(rows.tolist())[:5]}), expected a finite number; a smaller learning rate may help"
    )
