"""The policy of a fit, the same for every engine: which rows are learned, in which order, at which rates; what is kept.

Every row is learned once (`passes` = 1): a second pass overfits the rare categories. A first model learns its rows
shuffled, and its learning rate falls to zero over the second half. A round learns its rows in time order, since the
world may have changed within its window, and tries several constant rates, each from the parent: a low one keeps what
is known, a high one learns a change. Just before a fit learns the last tenth of its rows it scores them (progressive
validation: Blum, Kalai and Langford 1999); that chooses the rate, and no row has to be held back for it. A later rate
that loses learns no more. `benchmarks.quality` has the measurements.

Rows may have sample weights: they count in every step, in the choice of the rate and in the correction of the bias,
but not in an AUC. A model's weights lie in folders, which the engine restores and saves; none are held here. The order
of the rows within a pass is `row_order`'s, the weights that a fit starts from are `start`'s, the correction of the
logit is `calibration`'s, what a model in the store consists of is `step`'s.
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
    Judgement,
    Position,
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

_JUDGING_SHARE = 0.1
"""Share of a pass, its end, that is scored before it is learned."""
_DECAYING_SHARE = 0.5
"""Share of a first model's steps, their end, in which its learning rate falls to zero."""
_MOST_SCORED_ROWS = 1 << 20
"""Rows that are scored at a time; of more, evenly spaced ones are taken. A million rows tell a click rate of 3 % to
0.6 % of itself."""
_PART_ROWS = 1 << 16
"""Rows of which labels or numbers are copied at a time, where all are looked at."""
_CHECKED_ROWS = 1 << 12
"""Rows whose scores have to be finite before a trial's weights are kept."""
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
    """Folder of `evergreen.networks.files`; scores are of all rows, also where rows were thinned."""
    optimizer_step: int
    """Steps taken, those of earlier rounds included."""
    progressive: Mapping[str, float | None]
    """`auc` and `log_loss` of a tenth of the rows, scored just before they were learned: a round's newest, any of a
    first model's. They are of thinned rows where the training set is, and so is what is scored: their log loss is
    that of another click rate than the held-out rows'."""
    learning_rate: float
    """The rate that was chosen."""
    rows_per_second: float | None
    """Fitted rows per second of fitting; None where nothing was fitted in this process."""
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
    """Fits the engine's network to the training set.

    `engine` is a new one for the job's network, which the caller closes. `emit` takes the numbers of each pass, and
    some within it; `should_stop`, asked between segments, says whether to save and end.

    Raises:
        ContractError: the training set is not what its manifest says, or has labels of one class.
        PermanentError: a loss or a score is not finite at the first of the rates; a later one is given up instead.
        Preempted: `should_stop` was true; the fit is saved, and goes on where it is called again.
    """
    return _Fit(job, engine, emit=emit, clock=clock, should_stop=should_stop).run()


class _DivergedError(PermanentError):
    """A loss or a score is not finite."""


class _TrialLost(Exception):  # noqa: N818 - no error
    """The rate of this trial is not the best so far, and no later row can make it so."""


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
        features, weighted = manifest.recommender.features, manifest.recommender.data.has_weights
        train = local_path(manifest.train_uri)
        folders = [RowFolder(path=train, num_rows=manifest.num_train_rows, features=features, weighted=weighted)]
        if manifest.replay_uri is not None and manifest.replay_share > 0:
            replay = local_path(manifest.replay_uri)
            folders.append(replace(folders[0], path=replay, num_rows=manifest.num_replay_rows))
        self._rows = engine.open_rows(folders, manifest.slot_sizes, job.checkpoint_path)
        self._num_new = manifest.num_train_rows
        num_replayed = replayed(self._num_new, manifest.replay_share, len(self._rows) - self._num_new)
        self._part = PassRows(num_new=self._num_new, num_old=len(self._rows) - self._num_new, num_replayed=num_replayed)
        settings = self._settings
        self._batch_size = min(settings.batch_size, max(settings.min_batch_size, len(self._part) // settings.min_steps))
        self._num_batches = -(-len(self._part) // self._batch_size)
        self._judged_at = self._num_batches - max(1, round(self._num_batches * _JUDGING_SHARE))
        shares = settings.round_rates if job.start else (1.0,)
        self._learning_rates = [settings.learning_rate * share for share in shares]
        self._folder = CheckpointFolder(job.checkpoint_path)
        self._rows_learned = 0
        self._seconds = 0.0
        self._saved_at = clock()

    def run(self) -> FitResult:
        """Makes the passes at each rate, then corrects the bias of the best weights."""
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
                    now = self._learn_pass()
                    self._keep(replace(self._state, now=now))
                self._end_trial()
            except _TrialLost:
                self._leave_trial()
            except _DivergedError as error:
                self._give_up_trial(error)
        self._finish()
        return self._result()

    def _check_labels(self) -> None:
        num_rows, num_clicks, of_weight = 0, 0, "" if self._rows.weights is None else " of a weight above 0"
        for part in self._parts():
            labels, weights = self._rows.labels[part], self._weights(part)
            labels = labels if weights is None else labels[weights > 0]
            num_rows, num_clicks = num_rows + len(labels), num_clicks + int(np.count_nonzero(labels))
        if num_clicks in (0, num_rows):
            raise ContractError(
                f"labels of the {num_rows} rows to learn{of_weight} hold {num_clicks} clicks, expected clicks and "
                "non-clicks"
            )

    def _parts(self) -> Iterator[slice]:
        """The new rows in parts, which may be copied."""
        for at in range(0, self._num_new, _PART_ROWS):
            yield slice(at, min(at + _PART_ROWS, self._num_new))

    def _weights(self, which: slice | NDArray[np.int64]) -> NDArray[np.float32] | None:
        """The sample weights of some rows; None where each counts 1."""
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
            self._folder.keep_weights(
                START,
                lambda folder: write_initial(
                    folder,
                    job.config,
                    job.training_set.slot_sizes,
                    click_rate=rate,
                    seed=job.settings.seed,
                    places=job.training_set.recommender.features.id_places,
                ),
            )
        num_old = len(self._rows) - self._num_new
        logger.info(
            "fit begins: %d rows in batches of %d, %d replay rows at hand", self._num_new, self._batch_size, num_old
        )
        state = Checkpoint(now=self._at_start(0))
        self._folder.save(state)
        return state

    def _at_start(self, trial: int) -> Position:
        """The engine gets the weights that the fit began from."""
        self._engine.restore(self._path(START))
        return Position(trial=trial, passes=0, step=self._engine.num_steps, weights=START)

    def _path(self, weights: str) -> Path:
        if weights == START and self._job.start:
            return self._job.start
        return self._folder.path / weights

    def _end_trial(self) -> None:
        """Keeps the trial's weights where they are the best."""
        trial = self._state.now.trial
        if best_of(self._state.judged) == trial:
            self._scores(np.arange(min(self._num_new, _CHECKED_ROWS)))  # the last step may have gone wrong
            self._save(self._state)
            self._state = replace(self._state, best=self._state.now)
        self._leave_trial()

    def _give_up_trial(self, error: _DivergedError) -> None:
        """Goes on without the trial where an earlier one ended; else the fit ends with its error."""
        trial = self._state.now.trial
        if self._state.best is None:
            raise error
        logger.warning("learning rate %g is given up: %s", self._learning_rates[trial], error)
        self._state = replace(self._state, judged=(*self._state.judged[:trial], DIVERGED))
        self._leave_trial()

    def _leave_trial(self) -> None:
        """Goes back to the start for the next trial; after the last to the best weights."""
        trial, best = self._state.now.trial, self._state.best
        assert best is not None, "the first trial is the best of those before the second"
        if trial + 1 < len(self._learning_rates):
            now = self._at_start(trial + 1)
        else:
            now = replace(best, trial=trial + 1)
            if best.trial != trial:
                self._engine.restore(self._path(best.weights))
        self._commit(replace(self._state, now=now))

    def _finish(self) -> None:
        """Keeps the best weights with their bias corrected."""
        numbers = np.arange(0, self._num_new, -(-self._num_new // _MOST_SCORED_ROWS))
        labels, weights = self._rows.labels[numbers], self._weights(numbers)
        shift = newest_bias_shift(labels, self._scores(numbers), weights)
        served_shift = 0.0
        if served_ids := self._served_ids():
            as_served = corrected(self._scores(numbers, ids=served_ids), shift)
            served_shift = newest_bias_shift(labels, as_served, weights)
        # Weights of thinned rows become those of all rows: once, on the way to the final folder.
        shift += log_odds_correction(self._job.training_set.negative_rate)

        def save(folder: Path) -> None:
            self._engine.save(folder)
            add_to_bias(folder, shift + served_shift)

        self._folder.keep_weights(FINAL, save)
        # The position stays that of the weights on disk, should the final ones be taken away and wanted again.
        self._commit(replace(self._on_disk, final_step=self._engine.num_steps, served_shift=served_shift))
        logger.info(
            "fit ends: learning rate %g, bias moved by %+.4f and %+.4f more as served",
            self._chosen_rate,
            shift,
            served_shift,
        )

    def _served_ids(self) -> dict[int, int]:
        """See `FeatureWorkflow.served_ids`."""
        manifest = self._job.training_set
        if not manifest.recommender.features.served_as:
            return {}
        return FeatureWorkflow.load(local_path(manifest.workflow_uri)).served_ids

    def _result(self) -> FitResult:
        assert self._state.final_step is not None, "only an ended fit has a result"
        return FitResult(
            weights=self._folder.path / FINAL,
            optimizer_step=self._state.final_step,
            progressive=self._chosen.scores,
            learning_rate=self._chosen_rate,
            rows_per_second=self._rows_per_second,
            served_shift=self._state.served_shift,
        )

    @property
    def _chosen(self) -> Judgement:
        return self._state.judged[best_of(self._state.judged)]

    @property
    def _chosen_rate(self) -> float:
        return self._learning_rates[best_of(self._state.judged)]

    def _keep(self, state: Checkpoint) -> None:
        """Goes on from `state`; writes it only where it is time: nobody needs its weights for anything else."""
        if self._is_save_due:
            self._save(state)
        else:
            self._state = state

    def _save(self, state: Checkpoint) -> None:
        now = state.now
        name = f"weights-{now.trial:02d}-{now.passes:06d}-{now.batches:09d}"
        self._folder.keep_weights(name, self._engine.save)
        self._commit(replace(state, now=replace(now, weights=name)))
        self._saved_at = self._clock()

    def _commit(self, state: Checkpoint) -> None:
        self._folder.save(state)
        self._on_disk = self._state = state

    def _judge(self, order: PassOrder) -> None:
        """Scores the rows of the pass that are still to be learned; replayed ones, learned long ago, do not count.

        Trials are compared after the correction of the bias that `_finish` makes anyway. At a high rate the bias
        wanders from step to step, and would hide what was learned.
        """
        first, pieces = self._judged_at * self._batch_size, []
        for at in range(first, len(order), _PART_ROWS):
            piece = order.rows(at, at + _PART_ROWS)
            pieces.append(piece[piece < self._num_new][:: -(-(len(order) - first) // _MOST_SCORED_ROWS)])
        numbers = np.sort(np.concatenate(pieces))
        labels, weights, probabilities = self._rows.labels[numbers], self._weights(numbers), self._scores(numbers)
        final = corrected(probabilities, newest_bias_shift(labels, probabilities, weights))
        loss = log_loss(labels, probabilities, weights=weights)
        judgement = Judgement(
            scores={"auc": roc_auc(labels, probabilities), "log_loss": loss},
            row_losses=row_weighted(row_log_losses(labels, final), weights),
        )
        state = self._state
        self._state = replace(state, judged=(*state.judged, judgement))
        self._show({"step": self._engine.num_steps, "trial": state.now.trial, **judgement.scores})

    def _scores(self, numbers: NDArray[np.int64], ids: Mapping[int, int] | None = None) -> NDArray[np.float32]:
        """The network's scores of these rows; `ids` stand in for those of their places in every row."""
        rows = self._rows.take(numbers)
        for place, one in (ids or {}).items():
            rows.ids[:, place] = one
        probabilities = self._engine.score(rows)
        if num_wrong := int((~np.isfinite(probabilities)).sum()):
            raise _DivergedError(
                f"{num_wrong} of {len(probabilities)} scores are not finite after step {self._engine.num_steps}, "
                "expected probabilities; try a smaller learning rate"
            )
        return probabilities

    def _show(self, numbers: Numbers) -> None:
        self._emit(numbers)
        logger.info(", ".join(f"{name} {value:,.5g}" for name, value in numbers.items() if value is not None))

    def _rate(self, trial: int) -> Rate:
        """The learning rate of each step: a round's is constant, since its newest rows come last."""
        full, total = self._learning_rates[trial], self._num_batches * self._settings.passes
        if self._job.start:
            return lambda step: full
        return lambda step: full * min(1.0, max(total - step + 1, 1) / total / _DECAYING_SHARE)

    def _learn_pass(self) -> Position:
        """Goes on from the present position to the end of its pass; the position there.

        A segment's seed comes from its position alone, so a pass that goes on after a break takes the steps that an
        unbroken one takes.
        """
        now, num_batches, batch_size = self._state.now, self._num_batches, self._batch_size
        seed = derived_seed(self._settings.seed, now.passes + 1)
        order = PassOrder(self._part, seed, in_time_order=self._job.start is not None)
        rate = self._rate(now.trial)
        segment = self._engine.segment_batches(batch_size)
        emitted_at = self._clock()
        while now.batches < num_batches:
            if now.batches == self._judged_at and len(self._state.judged) == now.trial:
                self._judge(order)
                if best_of(self._state.judged) != now.trial:
                    raise _TrialLost
            stop = min(now.batches + segment, num_batches if now.batches >= self._judged_at else self._judged_at)
            numbers = order.rows(now.batches * batch_size, stop * batch_size)
            loss = self._learn_segment(numbers, now, rate)
            if not math.isfinite(loss):
                raise _DivergedError(
                    f"loss is not finite in pass {now.passes + 1}, batches {now.batches + 1} to {stop} of {num_batches}"
                    ", expected a finite number; look for values far from the others, or try a smaller learning rate"
                )
            loss_sum = now.loss_sum + loss * (stop - now.batches)
            now = replace(now, batches=stop, loss_sum=loss_sum, step=self._engine.num_steps)
            if self._clock() - emitted_at >= _EMIT_SECONDS:
                emitted_at = self._clock()
                self._show({**self._where(now), "batches": num_batches, "segment_loss": loss, **self._speed()})
            is_asked = self._should_stop()
            if is_asked or self._is_save_due:
                self._save(replace(self._state, now=now))
            if is_asked:
                raise Preempted(f"asked to stop: saved in pass {now.passes + 1}, batch {now.batches} of {num_batches}")
        mean_loss = now.loss_sum / num_batches
        self._show({**self._where(now), "training_loss": mean_loss, **self._speed()})
        return replace(now, passes=now.passes + 1, batches=0, loss_sum=0.0)

    def _learn_segment(self, numbers: NDArray[np.int64], now: Position, rate: Rate) -> float:
        began = self._clock()
        seed = derived_seed(self._settings.seed, now.passes + 1, now.batches + 1)
        loss = self._engine.learn(self._rows, numbers, batch_size=self._batch_size, seed=seed, rate=rate)
        self._rows_learned += len(numbers)
        self._seconds += self._clock() - began
        return loss

    def _where(self, now: Position) -> Numbers:
        return {"step": now.step, "trial": now.trial, "pass": now.passes + 1, "batch": now.batches}

    def _speed(self) -> Numbers:
        return {"rows_per_second": self._rows_per_second}

    @property
    def _rows_per_second(self) -> float | None:
        return self._rows_learned / self._seconds if self._seconds > 0 else None

    @property
    def _is_save_due(self) -> bool:
        return self._clock() - self._saved_at >= 60 * self._settings.checkpoint_minutes
