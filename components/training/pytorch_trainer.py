"""The PyTorch backend: epochs over rows held in memory, early stopping on the newest of them, checkpoints.

Runs on a GPU where there is one, else on the CPU, where equal input gives equal bits. The arithmetic of a step is
`components.dcn`'s and `optimizers`'; what a model in the store consists of is `publish`'s.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from components.contracts.errors import ContractError, PermanentError
from components.contracts.metrics import log_loss, roc_auc
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
        self._rows_seen, self._seconds = 0, 0.0

    def run(self) -> FitResult:
        """Fits until early stopping or the last epoch, then finishes from the best weights."""
        path, config, slot_sizes = self._job.checkpoint_path, self._job.config, self._job.training_set.slot_sizes
        state = checkpoints.load(path, config, slot_sizes) or self._begin()
        self._stepper.restore(state.now.weights, state.now.step)
        while not self._ended(state):
            epoch = state.now.epoch + 1
            training_loss = self._pass(self._fitted, epoch)
            now = self._judge(epoch, training_loss)
            state = Checkpoint(now=now, best=now if _loss(now) < _loss(state.best) else state.best)
            checkpoints.save(path, config, state)
        self._stepper.restore(state.best.weights, state.best.step)
        for number in range(1, self._settings.finish_epochs + 1):
            self._pass(self._stopping, self._settings.max_epochs + number)
        logger.info("fit ends: best epoch %d, log loss %.5f", state.best.epoch, _loss(state.best))
        return FitResult(
            weights=self._stepper.weights(),
            optimizer_step=self._stepper.num_steps,
            early_stopping=state.best.scores,
            rows_per_second=self._rows_seen / self._seconds if self._seconds > 0 else None,
        )

    def _begin(self) -> Checkpoint:
        """The state before the first epoch; a parent that no epoch betters stays the best."""
        start = self._job.start
        if start is None:
            rate = float(self._fitted.labels.mean(dtype=np.float64))
            sizes, seed = self._job.training_set.slot_sizes, self._settings.seed
            start = Start(
                weights=initial_weights(self._job.config, sizes, click_rate=rate, seed=seed), optimizer_step=0
            )
        self._stepper.restore(start.weights, start.optimizer_step)
        logger.info("fit begins: %d rows on %s, %d rows judge", len(self._fitted), self._device, len(self._stopping))
        now = self._judge(0, None)
        return Checkpoint(now=now, best=now)

    def _ended(self, state: Checkpoint) -> bool:
        stale = state.now.epoch - state.best.epoch
        return state.now.epoch >= self._settings.max_epochs or stale > self._settings.patience

    def _judge(self, epoch: int, training_loss: float | None) -> Moment:
        """The network as it is, scored on the stopping slice."""
        probabilities = predict(self._stepper.network, self._stopping.dense, self._stopping.ids)
        scores = {
            "auc": roc_auc(self._stopping.labels, probabilities),
            "log_loss": log_loss(self._stopping.labels, probabilities),
        }
        speed = self._rows_seen / self._seconds if self._seconds > 0 else None
        step = self._stepper.num_steps
        self._sink.log_dict({"epoch": epoch, "training_loss": training_loss, **scores, "rows_per_second": speed}, step)
        said = [f"{name} {value:.5g}" for name, value in scores.items() if value is not None]
        said += [] if training_loss is None else [f"training loss {training_loss:.5f}", f"{speed or 0:,.0f} rows/s"]
        logger.info("epoch %d: %s", epoch, ", ".join(said))
        return Moment(epoch=epoch, step=step, weights=self._stepper.weights(), scores=scores)

    def _pass(self, rows: Rows, epoch: int) -> float:
        """One pass over `rows` in an order of its own; the mean loss of its batches, each before its step."""
        seed = int(np.random.SeedSequence([self._settings.seed, epoch]).generate_state(1)[0])
        torch.manual_seed(seed)
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(rows)))
        tensors = [torch.from_numpy(a) for a in (rows.labels, rows.dense, rows.ids)]
        batches = order.split(self._settings.batch_size)
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
