"""Training policy, the same for every engine: which rows, in which order, at which learning rates.

Every row is used once (`passes` = 1), because a second pass overfits rare categories. A first model
trains on shuffled rows, and its learning rate falls to zero over the second half. An incremental
run trains on its rows in time order, because the click behaviour can change within its window.

An incremental run tries several constant learning rates, each from the parent's weights. With a low
rate, the weights stay close to the parent's weights. With a high rate, the model follows a change
faster. The last tenth of the rows is scored before these rows are used for training (progressive
validation: Blum, Kalai and Langford 1999). The rate with the best score on the last tenth is used,
so no rows have to be held out. If a later rate scores worse, the trial of this rate ends early.
`benchmarks.quality` has the measurements.

Rows may have sample weights. The weights are used in every step, in the choice of the rate and in
the correction of the bias, but in no AUC. The engine restores the model's weights from folders and
saves the weights to folders. This module does not load the weights. `row_order` orders the rows of
a pass, `start` writes the initial weights, `calibration` corrects the logit, and `step` publishes
the model.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from components.training.calibration import corrected, newest_bias_shift
from components.training.checkpoint import (
    DIVERGED,
    FINAL,
    START,
    Checkpoint,
    CheckpointFolder,
    Position,
    TrialEvaluation,
    best_of,
)
from components.training.engine import Engine, Rate
from components.training.row_order import PassOrder, PassRows, derived_seed, replayed
from components.training.rows import RowFolder
from components.training.start import log_odds_correction, write_initial
from evergreen.config.model import NetworkConfig
from evergreen.config.training import TrainingSettings
from evergreen.contracts.manifests import TrainingSet
from evergreen.contracts.workflow import FeatureWorkflow
from evergreen.networks.files import add_to_bias
from evergreen.runtime.errors import ContractError, PermanentError, Preempted
from evergreen.statistics.metrics import log_loss, roc_auc, row_log_losses, row_weighted
from evergreen.storage.uris import local_path

logger = logging.getLogger(__name__)

_EVALUATED_SHARE = 0.1
"""Share of a pass that is scored before the network trains on it. The scored rows are the last rows
of the pass."""
_DECAYING_SHARE = 0.5
"""Share of a first model's steps in which the learning rate falls to zero. The decay is at the end
of the fit."""
_MAX_SCORED_ROWS = 1 << 20
"""Maximum number of rows that are scored at a time. If there are more rows, evenly spaced rows are
scored. A million rows determine a click rate of 3 % to within 0.6 % of its value."""
_PART_ROWS = 1 << 16
"""Number of rows whose labels or numbers are copied at a time, in a loop over all rows."""
_CHECKED_ROWS = 1 << 12
"""Number of rows whose scores must be finite before a trial's weights are saved."""
_EMIT_SECONDS = 10.0
"""Seconds between two reports within a pass."""

Numbers = Mapping[str, float | None]
"""Numbers that a fit reports at one step, by name. An undefined number is None."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FitJob:
    """Input of one fit."""

    training_set: TrainingSet
    config: NetworkConfig
    settings: TrainingSettings
    start: Path | None
    """Folder of the parent's weights, in the layout of the training set. None to train from
    scratch."""
    checkpoint_path: Path
    """Folder for the checkpoints of this fit. The fit continues from a checkpoint in this
    folder."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FitResult:
    """Result of one fit."""

    weights: Path
    """Folder of the final weights (`evergreen.networks.files`). The model's probabilities are
    correct for all rows, even if the training rows were downsampled."""
    optimizer_step: int
    """Number of optimizer steps, including steps of earlier runs."""
    progressive: Mapping[str, float | None]
    """`auc` and `log_loss` of a tenth of the rows, scored just before training on them. In an
    incremental run, the tenth consists of the newest rows. If the training set is downsampled, the
    rows of the tenth are downsampled too. In this case, their log loss cannot be compared with the
    log loss of the held-out rows, because the click rates differ."""
    learning_rate: float
    """The learning rate that was chosen."""
    rows_per_second: float | None
    """Training rows per second in this process, or None if the process trained on no rows."""
    served_shift: float
    """See `Model.served_shift`."""


def fit(
    job: FitJob,
    engine: Engine,
    *,
    emit: Callable[[Numbers], object],
    clock: Callable[[], float] = time.monotonic,
    should_stop: Callable[[], bool] = lambda: False,
) -> FitResult:
    """Fit the engine's network to the training set.

    Args:
        job: Training set, network, settings and folders.
        engine: New engine for the job's network. The caller closes it.
        emit: Called with the numbers of each pass, and periodically within a pass.
        clock: Time in seconds.
        should_stop: Called between segments. If the function returns True, the fit is saved and
            ends.

    Raises:
        ContractError: the training set does not match its manifest, or its labels are all equal.
        PermanentError: a loss or a score is not finite at the first learning rate. If a later rate
            diverges, only its trial is abandoned.
        Preempted: `should_stop` returned True. The fit is saved, and the next call continues it.
    """
    return _Fit(job, engine, emit=emit, clock=clock, should_stop=should_stop).run()


class _DivergedError(PermanentError):
    """A loss or a score is not finite."""


class _TrialAbandoned(Exception):  # noqa: N818 - no error
    """The trial was ended early, because an earlier learning rate is already better."""


class _Fit:
    """A fit in progress."""

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
        features, weighted = manifest.recommender.features, manifest.recommender.data.has_weights
        train = local_path(manifest.train_uri)
        folders = [
            RowFolder(
                path=train, num_rows=manifest.num_train_rows, features=features, weighted=weighted
            )
        ]
        if manifest.replay_uri is not None and manifest.replay_share > 0:
            replay = local_path(manifest.replay_uri)
            folders.append(replace(folders[0], path=replay, num_rows=manifest.num_replay_rows))
        self._rows = engine.open_rows(folders, manifest.slot_sizes, job.checkpoint_path)
        self._num_new = manifest.num_train_rows
        num_replayed = replayed(
            self._num_new, manifest.replay_share, len(self._rows) - self._num_new
        )
        self._part = PassRows(
            num_new=self._num_new,
            num_old=len(self._rows) - self._num_new,
            num_replayed=num_replayed,
        )
        settings = self._settings
        self._batch_size = min(
            settings.batch_size, max(settings.min_batch_size, len(self._part) // settings.min_steps)
        )
        self._num_batches = -(-len(self._part) // self._batch_size)
        self._evaluated_at = self._num_batches - max(1, round(self._num_batches * _EVALUATED_SHARE))
        shares = settings.round_rates if job.start else (1.0,)
        self._learning_rates = [settings.learning_rate * share for share in shares]
        self._folder = CheckpointFolder(job.checkpoint_path)
        self._rows_trained = 0
        self._seconds = 0.0
        self._saved_at = clock()

    def run(self) -> FitResult:
        """Train at each learning rate, then correct the bias of the best weights."""
        self._check_labels()
        found = self._folder.load()
        self._on_disk = self._state = found or self._begin()
        if self._state.final_step is not None:
            return self._result()
        if found:
            self._engine.restore(self._path(self._state.now.weights))
        while self._state.now.trial < len(self._learning_rates):
            try:
                while self._state.now.passes < self._settings.passes:
                    now = self._train_pass()
                    self._save_state(replace(self._state, now=now))
                self._end_trial()
            except _TrialAbandoned:
                self._start_next_trial()
            except _DivergedError as error:
                self._abandon_trial(error)
        self._finish()
        return self._result()

    def _check_labels(self) -> None:
        num_rows, num_clicks, of_positive_weight = (
            0,
            0,
            "" if self._rows.weights is None else " with a weight above 0",
        )
        for part in self._parts():
            labels, weights = self._rows.labels[part], self._weights(part)
            labels = labels if weights is None else labels[weights > 0]
            num_rows, num_clicks = (
                num_rows + len(labels),
                num_clicks + int(np.count_nonzero(labels)),
            )
        if num_clicks in (0, num_rows):
            raise ContractError(
                f"the {num_rows} training rows{of_positive_weight} have {num_clicks} clicks, "
                "expected rows with and without a click"
            )

    def _parts(self) -> Iterator[slice]:
        """Divide the new rows into slices that are small enough to copy."""
        for at in range(0, self._num_new, _PART_ROWS):
            yield slice(at, min(at + _PART_ROWS, self._num_new))

    def _weights(self, which: slice | NDArray[np.int64]) -> NDArray[np.float32] | None:
        """Return the sample weights of some rows, or None for equal weights."""
        return None if self._rows.weights is None else self._rows.weights[which]

    def _begin(self) -> Checkpoint:
        job = self._job
        if job.start is None:
            sums = np.zeros(2)
            for part in self._parts():
                labels, weights = self._rows.labels[part], self._weights(part)
                counts = np.ones(len(labels)) if weights is None else weights.astype(np.float64)
                sums += counts @ labels, counts.sum()
            rate = sums[0] / sums[1]
            self._folder.save_weights(
                START,
                lambda folder: write_initial(
                    folder,
                    job.config,
                    job.training_set.slot_sizes,
                    click_rate=rate,
                    seed=job.settings.seed,
                    positions=job.training_set.recommender.features.id_positions,
                ),
            )
        num_old = len(self._rows) - self._num_new
        logger.info(
            "fit starts: %d rows in batches of %d, %d replay rows available",
            self._num_new,
            self._batch_size,
            num_old,
        )
        state = Checkpoint(now=self._at_start(0))
        self._folder.save(state)
        return state

    def _at_start(self, trial: int) -> Position:
        """Restore the initial weights of the fit, and return the first position of the trial."""
        self._engine.restore(self._path(START))
        return Position(trial=trial, passes=0, step=self._engine.num_steps, weights=START)

    def _path(self, weights: str) -> Path:
        if weights == START and self._job.start:
            return self._job.start
        return self._folder.path / weights

    def _end_trial(self) -> None:
        """Save the trial's weights if the weights are the best so far."""
        trial = self._state.now.trial
        if best_of(self._state.evaluations) == trial:
            self._scores(
                np.arange(min(self._num_new, _CHECKED_ROWS))
            )  # the last step may have diverged
            self._save(self._state)
            self._state = replace(self._state, best=self._state.now)
        self._start_next_trial()

    def _abandon_trial(self, error: _DivergedError) -> None:
        """Abandon a diverged trial if an earlier one has ended.

        If no earlier trial has ended, raise the error.
        """
        trial = self._state.now.trial
        if self._state.best is None:
            raise error
        logger.warning("learning rate %g is abandoned: %s", self._learning_rates[trial], error)
        self._state = replace(self._state, evaluations=(*self._state.evaluations[:trial], DIVERGED))
        self._start_next_trial()

    def _start_next_trial(self) -> None:
        """Restore the initial weights for the next trial.

        After the last trial, restore the best weights.
        """
        trial, best = self._state.now.trial, self._state.best
        assert best is not None, "the first trial was saved as the best"
        if trial + 1 < len(self._learning_rates):
            now = self._at_start(trial + 1)
        else:
            now = replace(best, trial=trial + 1)
            if best.trial != trial:
                self._engine.restore(self._path(best.weights))
        self._commit(replace(self._state, now=now))

    def _finish(self) -> None:
        """Correct the bias of the best weights and save them as the final weights."""
        numbers = np.arange(0, self._num_new, -(-self._num_new // _MAX_SCORED_ROWS))
        labels, weights = self._rows.labels[numbers], self._weights(numbers)
        shift = newest_bias_shift(labels, self._scores(numbers), weights)
        served_shift = 0.0
        if served_ids := self._served_ids():
            as_served = corrected(self._scores(numbers, ids=served_ids), shift)
            served_shift = newest_bias_shift(labels, as_served, weights)
        # The correction for negative downsampling is applied once, when the final folder is
        # written.
        shift += log_odds_correction(self._job.training_set.negative_rate)

        def save(folder: Path) -> None:
            self._engine.save(folder)
            add_to_bias(folder, shift + served_shift)

        self._folder.save_weights(FINAL, save)
        # `_on_disk` describes the weights that are saved on disk. After `step` has moved the final
        # weights to the registry, a later call uses `_on_disk` to write them again.
        self._commit(
            replace(self._on_disk, final_step=self._engine.num_steps, served_shift=served_shift)
        )
        logger.info(
            "fit ended: learning rate %g, bias corrected by %+.4f, and by %+.4f for features "
            "served as one value",
            self._chosen_rate,
            shift,
            served_shift,
        )

    def _served_ids(self) -> dict[int, int]:
        """Return `FeatureWorkflow.served_ids`.

        The result is empty if no feature is served as one value.
        """
        manifest = self._job.training_set
        if not manifest.recommender.features.served_as:
            return {}
        return FeatureWorkflow.load(local_path(manifest.workflow_uri)).served_ids

    def _result(self) -> FitResult:
        assert self._state.final_step is not None, "the fit has ended"
        return FitResult(
            weights=self._folder.path / FINAL,
            optimizer_step=self._state.final_step,
            progressive=self._chosen.scores,
            learning_rate=self._chosen_rate,
            rows_per_second=self._rows_per_second,
            served_shift=self._state.served_shift,
        )

    @property
    def _chosen(self) -> TrialEvaluation:
        return self._state.evaluations[best_of(self._state.evaluations)]

    @property
    def _chosen_rate(self) -> float:
        return self._learning_rates[best_of(self._state.evaluations)]

    def _save_state(self, state: Checkpoint) -> None:
        """Continue from `state`, and write a checkpoint if the last save is old enough."""
        if self._is_save_due:
            self._save(state)
        else:
            self._state = state

    def _save(self, state: Checkpoint) -> None:
        now = state.now
        name = f"weights-{now.trial:02d}-{now.passes:06d}-{now.batches:09d}"
        self._folder.save_weights(name, self._engine.save)
        self._commit(replace(state, now=replace(now, weights=name)))
        self._saved_at = self._clock()

    def _commit(self, state: Checkpoint) -> None:
        self._folder.save(state)
        self._on_disk = self._state = state

    def _evaluate(self, order: PassOrder) -> None:
        """Evaluate the trial on the rest of the pass. Replayed rows are not evaluated.

        Trials are compared after the correction of the bias, which `_finish` applies anyway. At a
        high rate, the bias varies from step to step, and this variation would hide the quality of
        the network.
        """
        first, chunks = self._evaluated_at * self._batch_size, []
        for at in range(first, len(order), _PART_ROWS):
            chunk = order.rows(at, at + _PART_ROWS)
            chunks.append(
                chunk[chunk < self._num_new][:: -(-(len(order) - first) // _MAX_SCORED_ROWS)]
            )
        numbers = np.sort(np.concatenate(chunks))
        labels, weights, probabilities = (
            self._rows.labels[numbers],
            self._weights(numbers),
            self._scores(numbers),
        )
        final = corrected(probabilities, newest_bias_shift(labels, probabilities, weights))
        loss = log_loss(labels, probabilities, weights=weights)
        evaluation = TrialEvaluation(
            scores={"auc": roc_auc(labels, probabilities), "log_loss": loss},
            row_losses=row_weighted(row_log_losses(labels, final), weights),
        )
        state = self._state
        self._state = replace(state, evaluations=(*state.evaluations, evaluation))
        self._report(
            {"step": self._engine.num_steps, "trial": state.now.trial, **evaluation.scores}
        )

    def _scores(
        self, numbers: NDArray[np.int64], ids: Mapping[int, int] | None = None
    ) -> NDArray[np.float32]:
        """Return the network's scores of these rows.

        Args:
            numbers: Row numbers.
            ids: New ids. The key is the number of an id column, and the value replaces all ids of
                this column.
        """
        rows = self._rows.take(numbers)
        for position, one in (ids or {}).items():
            rows.ids[:, position] = one
        probabilities = self._engine.score(rows)
        if num_wrong := int((~np.isfinite(probabilities)).sum()):
            raise _DivergedError(
                f"{num_wrong} of {len(probabilities)} scores are not finite after step "
                f"{self._engine.num_steps}, expected probabilities; try a smaller learning rate"
            )
        return probabilities

    def _report(self, numbers: Numbers) -> None:
        self._emit(numbers)
        logger.info(
            ", ".join(
                f"{name} {value:,.5g}" for name, value in numbers.items() if value is not None
            )
        )

    def _rate(self, trial: int) -> Rate:
        """Return the learning rate of each step.

        An incremental run has a constant rate, because its newest rows come last.
        """
        full, total = self._learning_rates[trial], self._num_batches * self._settings.passes
        if self._job.start:
            return lambda step: full
        return lambda step: full * min(1.0, max(total - step + 1, 1) / total / _DECAYING_SHARE)

    def _train_pass(self) -> Position:
        """Train from the current position to the end of its pass, and return the new position.

        The seed of a segment depends only on its position, so an interrupted pass takes the same
        steps as an uninterrupted pass.
        """
        now, num_batches, batch_size = self._state.now, self._num_batches, self._batch_size
        seed = derived_seed(self._settings.seed, now.passes + 1)
        order = PassOrder(self._part, seed, in_time_order=self._job.start is not None)
        rate = self._rate(now.trial)
        segment = self._engine.segment_batches(batch_size)
        emitted_at = self._clock()
        while now.batches < num_batches:
            if now.batches == self._evaluated_at and len(self._state.evaluations) == now.trial:
                self._evaluate(order)
                if best_of(self._state.evaluations) != now.trial:
                    raise _TrialAbandoned
            stop = min(
                now.batches + segment,
                num_batches if now.batches >= self._evaluated_at else self._evaluated_at,
            )
            numbers = order.rows(now.batches * batch_size, stop * batch_size)
            loss = self._train_segment(numbers, now, rate)
            if not math.isfinite(loss):
                raise _DivergedError(
                    f"loss is not finite in pass {now.passes + 1}, batches {now.batches + 1} to "
                    f"{stop} of {num_batches}, expected a finite number; look for outliers, or "
                    "try a smaller learning rate"
                )
            loss_sum = now.loss_sum + loss * (stop - now.batches)
            now = replace(now, batches=stop, loss_sum=loss_sum, step=self._engine.num_steps)
            if self._clock() - emitted_at >= _EMIT_SECONDS:
                emitted_at = self._clock()
                self._report(
                    {
                        **self._position_numbers(now),
                        "batches": num_batches,
                        "segment_loss": loss,
                        **self._speed_numbers(),
                    }
                )
            must_stop = self._should_stop()
            if must_stop or self._is_save_due:
                self._save(replace(self._state, now=now))
            if must_stop:
                raise Preempted(
                    f"stopped on request: saved in pass {now.passes + 1}, batch {now.batches} of "
                    f"{num_batches}"
                )
        mean_loss = now.loss_sum / num_batches
        self._report(
            {**self._position_numbers(now), "training_loss": mean_loss, **self._speed_numbers()}
        )
        return replace(now, passes=now.passes + 1, batches=0, loss_sum=0.0)

    def _train_segment(self, numbers: NDArray[np.int64], now: Position, rate: Rate) -> float:
        began = self._clock()
        seed = derived_seed(self._settings.seed, now.passes + 1, now.batches + 1)
        loss = self._engine.train(
            self._rows, numbers, batch_size=self._batch_size, seed=seed, rate=rate
        )
        self._rows_trained += len(numbers)
        self._seconds += self._clock() - began
        return loss

    def _position_numbers(self, now: Position) -> Numbers:
        return {"step": now.step, "trial": now.trial, "pass": now.passes + 1, "batch": now.batches}

    def _speed_numbers(self) -> Numbers:
        return {"rows_per_second": self._rows_per_second}

    @property
    def _rows_per_second(self) -> float | None:
        return self._rows_trained / self._seconds if self._seconds > 0 else None

    @property
    def _is_save_due(self) -> bool:
        return self._clock() - self._saved_at >= 60 * self._settings.checkpoint_minutes
