"""The policy of a fit, the same for every engine: which rows are learned how often, what is kept, when it ends.

An incremental round exists because the world may have changed, most likely within its window. Fitting the whole window
then teaches the old world once more: with the newest third changed, that regained 20 % of the AUC lost, fitting the
newest eighth alone 70 %; in an unchanged world the whole window is best. So a round fits several parts ("branches": the
newest 1, 1/2, 1/4, ... of the rows), each from the parent, and the slice of the very newest rows chooses.

Weights lie in folders, which the engine restores and saves; none are held here. The order of the rows within a pass is
`row_order`'s, the weights that a fit starts from are `start`'s, what a model in the store consists of is `publish`'s.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from components.contracts.manifests import TrainingSet
from components.contracts.metrics import log_loss, roc_auc, row_log_losses
from components.models.configs import NetworkConfig
from components.models.files import add_to_bias
from components.runtime.errors import ContractError, PermanentError, Preempted
from components.storage.uris import local_path
from components.training.checkpoint import FINAL, START, Checkpoint, CheckpointFolder, Moment, Position
from components.training.config import TrainingSettings
from components.training.engine import Engine
from components.training.row_order import PassOrder, PassRows, derived_seed, replayed
from components.training.rows import RowFolder, open_rows
from components.training.start import log_odds_correction, write_initial

logger = logging.getLogger(__name__)

_EMIT_SECONDS = 10.0
"""Time between the numbers that are emitted within a pass."""

Numbers = Mapping[str, float | None]
"""What a fit emits at one step, by name; None is a number that does not exist."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FitJob:
    """One fit."""

    training_set: TrainingSet
    config: NetworkConfig
    settings: TrainingSettings
    start: Path | None
    """Folder of the parent's weights, laid out for the training set; None = from scratch."""
    checkpoint_path: Path
    """Folder for checkpoints of this fit; a fit that finds one there continues it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FitResult:
    """What a fit ended with."""

    weights: Path
    """Folder of `components.models.files`; scores are of all rows, also where rows were thinned."""
    optimizer_step: int
    """Steps taken, those of earlier rounds included."""
    early_stopping: Mapping[str, float | None]
    """`auc` and `log_loss` of the best weights on the stopping slice, before that slice was learned. The slice is of
    thinned rows where the training set is, and so is what is scored: its log loss is that of another click rate than
    the held-out rows', and says which weights are better, not how good they are."""
    rows_per_second: float | None
    """Fitted rows per second of fitting; None where nothing was fitted in this process."""


def fit(
    job: FitJob,
    engine: Engine,
    *,
    emit: Callable[[Numbers], object],
    clock: Callable[[], float] = time.monotonic,
    should_stop: Callable[[], bool] = lambda: False,
) -> FitResult:
    """Fits the engine's network to the training set.

    Args:
        job: What is fitted, and where checkpoints lie.
        engine: A new one for the job's network; closing it is the caller's.
        emit: Takes the numbers of each pass, and some within it.
        clock: Seconds, for speeds and for the checkpoints' interval.
        should_stop: Whether to save and end; asked between segments.

    Raises:
        ContractError: the training set is not what its manifest says, or has labels of one class.
        PermanentError: a loss or a score is not finite.
        Preempted: `should_stop` was true; the fit is saved, and goes on where it is called again.
    """
    return _Fit(job, engine, emit=emit, clock=clock, should_stop=should_stop).run()


class _Fit:
    """One fit under way."""

    def __init__(
        self,
        job: FitJob,
        engine: Engine,
        *,
        emit: Callable[[Numbers], object],
        clock: Callable[[], float],
        should_stop: Callable[[], bool],
    ) -> None:
        self._job = job
        self._settings = job.settings
        self._engine = engine
        self._emit = emit
        self._clock = clock
        self._should_stop = should_stop
        manifest = job.training_set
        folders = [RowFolder(path=local_path(manifest.train_uri), num_rows=manifest.num_train_rows)]
        if manifest.replay_uri is not None and manifest.replay_share > 0:
            folders.append(RowFolder(path=local_path(manifest.replay_uri), num_rows=manifest.num_replay_rows))
        self._rows = open_rows(folders, manifest.slot_sizes, job.checkpoint_path)
        num_stopping = max(1, round(manifest.num_train_rows * self._settings.stopping_fraction))
        self._num_fitted = max(0, manifest.num_train_rows - num_stopping)
        self._judging = slice(self._num_fitted, manifest.num_train_rows)
        self._last_branch = self._settings.num_halvings if job.start else 0
        self._folder = CheckpointFolder(job.checkpoint_path)
        self._rows_learned = 0
        self._seconds = 0.0
        self._saved_at = clock()

    def run(self) -> FitResult:
        """Fits each branch until it stops, then finishes from the best weights of all."""
        self._check_labels()
        found = self._folder.load()
        self._on_disk = self._state = found or self._begin()
        if self._state.final_step is not None:
            return self._result()
        if found:
            self._engine.restore(self._path(self._state.now.weights))
        while self._state.now.branch <= self._last_branch:
            while not self._ended():
                self._epoch()
            self._begin_branch()
        self._finish()
        return self._result()

    def _check_labels(self) -> None:
        num_clicks = int(self._rows.labels[: self._num_fitted].sum(dtype=np.float64))
        if num_clicks in (0, self._num_fitted):
            raise ContractError(
                f"labels of the {self._num_fitted} rows to fit hold {num_clicks} clicks, expected clicks and non-clicks"
            )

    def _begin(self) -> Checkpoint:
        """The state before the first epoch; a parent that no epoch betters stays the best."""
        if self._job.start is None:
            rate = float(self._rows.labels[: self._num_fitted].mean(dtype=np.float64))
            job = self._job
            self._folder.keep_weights(
                START,
                lambda folder: write_initial(
                    folder, job.config, job.training_set.slot_sizes, click_rate=rate, seed=job.settings.seed
                ),
            )
        now = self._at_start(0)
        logger.info(
            "fit begins: %d rows, %d of them judge, %d replay rows at hand",
            self._judging.stop,
            self._judging.stop - self._judging.start,
            len(self._rows) - self._judging.stop,
        )
        best = self._judge(now, None)
        state = Checkpoint(now=now, best=best, start_loss=best.loss, branch_loss=best.loss)
        self._folder.save(state)
        return state

    def _at_start(self, branch: int) -> Position:
        """The engine gets the weights that the fit began from."""
        self._engine.restore(self._path(START))
        return Position(branch=branch, epoch=0, step=self._engine.num_steps, weights=START)

    def _path(self, weights: str) -> Path:
        if weights == START and self._job.start:
            return self._job.start
        return self._folder.path / weights

    def _begin_branch(self) -> None:
        """Goes back to the start for the next branch, after the last one to the best weights, to finish from them."""
        branch, best = self._state.now.branch + 1, self._state.best
        if branch <= self._last_branch:
            now = self._at_start(branch)
        else:
            self._engine.restore(self._path(best.weights))
            now = Position(branch=branch, epoch=0, step=best.step, weights=best.weights)
        self._commit(replace(self._state, now=now, branch_loss=self._state.start_loss, stale=0))

    def _epoch(self) -> None:
        part = self._part(self._state.now.branch)
        now, training_loss = self._learn_pass(part, self._batch_size(part))
        moment = self._judge(now, training_loss)
        state, better = self._state, moment.loss < self._state.branch_loss
        state = replace(
            state,
            now=now,
            branch_loss=moment.loss if better else state.branch_loss,
            stale=0 if better else state.stale + 1,
        )
        if moment.is_better_than(state.best):
            self._save(state, best=moment)
        else:
            self._keep(state)

    def _ended(self) -> bool:
        now = self._state.now
        return now.epoch >= self._settings.max_epochs * 2**now.branch or self._state.stale > self._settings.patience

    def _finish(self) -> None:
        """Learns the stopping slice, from the best weights, and keeps what comes of it."""
        best = self._state.best
        batch_size = self._batch_size(self._part(best.branch))
        part = self._mixed(self._judging.start, self._judging.stop)
        while self._state.now.epoch < (best.epoch if self._settings.finish else 0):
            now, _ = self._learn_pass(part, batch_size)
            self._keep(replace(self._state, now=now))
        self._judging_scores(self._state.now)
        self._folder.keep_weights(FINAL, self._save_corrected)
        # The position stays that of the weights on disk, should the final ones be taken away and wanted again.
        self._commit(replace(self._on_disk, final_step=self._engine.num_steps))
        num_rows = len(self._part(best.branch))
        logger.info("fit ends: best is epoch %d on the newest %d rows, log loss %.5f", best.epoch, num_rows, best.loss)

    def _save_corrected(self, folder: Path) -> None:
        """The engine's weights, of thinned rows, as those of all rows: once, on the way to the final folder."""
        self._engine.save(folder)
        add_to_bias(folder, log_odds_correction(self._job.training_set.negative_rate))

    def _result(self) -> FitResult:
        assert self._state.final_step is not None, "only an ended fit has a result"
        return FitResult(
            weights=self._folder.path / FINAL,
            optimizer_step=self._state.final_step,
            early_stopping=self._state.best.scores,
            rows_per_second=self._rows_per_second,
        )

    def _part(self, branch: int) -> PassRows:
        """The rows of a branch's passes: the newest 1 / 2^branch of the fitted ones, and replayed ones."""
        return self._mixed(self._num_fitted - max(1, self._num_fitted >> branch), self._num_fitted)

    def _mixed(self, first: int, stop: int) -> PassRows:
        replay_first, replay_stop = self._judging.stop, len(self._rows)
        return PassRows(
            first=first,
            stop=stop,
            replay_first=replay_first,
            replay_stop=replay_stop,
            num_replayed=replayed(stop - first, self._job.training_set.replay_share, replay_stop - replay_first),
        )

    def _batch_size(self, part: PassRows) -> int:
        wanted = max(self._settings.min_batch_size, len(part) // self._settings.min_steps)
        return min(self._settings.batch_size, wanted)

    def _keep(self, state: Checkpoint) -> None:
        """Goes on from `state`; writes it only where it is time: nobody needs its weights for anything else."""
        if self._is_save_due:
            self._save(state)
        else:
            self._state = state

    def _save(self, state: Checkpoint, *, best: Moment | None = None) -> None:
        """Writes the engine's weights, and the state that names them; `best`, where given, is this moment."""
        now = state.now
        name = f"weights-{now.branch:02d}-{now.epoch:06d}-{now.batches:09d}"
        self._folder.keep_weights(name, self._engine.save)
        state = replace(state, now=replace(now, weights=name))
        self._commit(replace(state, best=replace(best, weights=name)) if best else state)
        self._saved_at = self._clock()

    def _commit(self, state: Checkpoint) -> None:
        self._folder.save(state)
        self._on_disk = self._state = state

    def _judge(self, now: Position, training_loss: float | None) -> Moment:
        """The network as it is, scored on the stopping slice."""
        labels = self._rows.labels[self._judging]
        probabilities = self._judging_scores(now)
        scores = {"auc": roc_auc(labels, probabilities), "log_loss": log_loss(labels, probabilities)}
        numbers = {"training_loss": training_loss, **scores, "rows_per_second": self._rows_per_second}
        self._emit({"step": now.step, "branch": now.branch, "epoch": now.epoch, **numbers})
        texts = [f"{name} {value:,.5g}" for name, value in numbers.items() if value is not None]
        logger.info("%d rows, epoch %d: %s", len(self._part(now.branch)), now.epoch, ", ".join(texts))
        return Moment(
            branch=now.branch,
            epoch=now.epoch,
            step=now.step,
            weights=now.weights,
            scores=scores,
            row_losses=row_log_losses(labels, probabilities),
        )

    def _judging_scores(self, now: Position) -> NDArray[np.float32]:
        """The network's scores of the stopping slice."""
        probabilities = self._engine.score(self._rows[self._judging])
        if num_wrong := int((~np.isfinite(probabilities)).sum()):
            raise PermanentError(
                f"{num_wrong} of {len(probabilities)} scores are not finite after step {now.step} (epoch {now.epoch}), "
                "expected probabilities; try a smaller learning rate"
            )
        return probabilities

    def _learn_pass(self, part: PassRows, batch_size: int) -> tuple[Position, float]:
        """Goes on from the present position to the end of its pass; the position there, and the mean loss.

        A segment's seed comes from its position alone, so a pass that goes on after a break takes the steps that an
        unbroken one takes.
        """
        now = self._state.now
        order = PassOrder(part, derived_seed(self._settings.seed, now.branch, now.epoch + 1))
        num_batches = -(-len(part) // batch_size)
        segment = self._engine.segment_batches(batch_size)
        emitted_at = self._clock()
        while now.batches < num_batches:
            stop = min(now.batches + segment, num_batches)
            loss = self._learn_segment(order.rows(now.batches * batch_size, stop * batch_size), batch_size, now)
            if not math.isfinite(loss):
                raise PermanentError(
                    f"loss is not finite at epoch {now.epoch + 1}, batches {now.batches + 1} to {stop} of {num_batches}"
                    ", expected a finite number; look for values far from the others, or try a smaller learning rate"
                )
            loss_sum = now.loss_sum + loss * (stop - now.batches)
            now = replace(now, batches=stop, loss_sum=loss_sum, step=self._engine.num_steps)
            if self._clock() - emitted_at >= _EMIT_SECONDS:
                emitted_at = self._clock()
                self._emit_progress(loss, now, num_batches)
            is_asked = self._should_stop()
            # What the end of a pass keeps is decided after it was judged.
            if is_asked or (self._is_save_due and now.batches < num_batches):
                self._save(replace(self._state, now=now))
            if is_asked:
                raise Preempted(f"asked to stop: saved at epoch {now.epoch + 1}, batch {now.batches} of {num_batches}")
        return replace(now, epoch=now.epoch + 1, batches=0, loss_sum=0.0), now.loss_sum / num_batches

    def _learn_segment(self, numbers: NDArray[np.int64], batch_size: int, now: Position) -> float:
        began = self._clock()
        seed = derived_seed(self._settings.seed, now.branch, now.epoch + 1, now.batches + 1)
        loss = self._engine.learn(self._rows, numbers, batch_size=batch_size, seed=seed)
        self._rows_learned += len(numbers)
        self._seconds += self._clock() - began
        return loss

    def _emit_progress(self, loss: float, now: Position, num_batches: int) -> None:
        where = {"branch": now.branch, "epoch": now.epoch + 1, "batch": now.batches}
        self._emit({"step": now.step, **where, "segment_loss": loss, "rows_per_second": self._rows_per_second})
        logger.info("branch %d, epoch %d: batch %d of %d, loss %.5f", *where.values(), num_batches, loss)

    @property
    def _rows_per_second(self) -> float | None:
        return self._rows_learned / self._seconds if self._seconds > 0 else None

    @property
    def _is_save_due(self) -> bool:
        return self._clock() - self._saved_at >= 60 * self._settings.checkpoint_minutes
