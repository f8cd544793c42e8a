"""A NumPy engine that implements the whole engine interface: logistic regression.

The parameters are a table with one weight for each id, one weight for each dense value, and the
bias. All weights of a list's ids are summed, and an empty position has a weight too. The optimizer
is Adagrad. Adagrad's sums are stored in place of Adam's second moments.
"""

import numpy as np

from components.training.fit import FitJob, fit
from components.training.rows import open_rows
from evergreen.config.model import DcnConfig
from evergreen.config.training import TrainingSettings
from evergreen.networks.files import new_model, open_model
from tests.support.planted_rows import POSITIONS, WIDTHS

# The configuration matches the names and shapes of the files that `start` writes. The engine uses
# only the tables (width 1) and the bias.
CONFIG = DcnConfig(**WIDTHS, embedding_dim=1, num_cross_layers=1, tower=(1,))
NUM_DENSE = CONFIG.num_dense
SETTINGS = TrainingSettings(learning_rate=0.1, batch_size=256, min_steps=300, min_batch_size=32)


class LogisticEngine:
    """Logistic regression as an engine of the training step.

    `calls` contains the calls of the engine. `rates` contains the learning rate of each step.
    """

    backend = "logistic"
    open_rows = staticmethod(open_rows)

    def __init__(self, slot_sizes, settings, *, segment=4, bad_at=None):
        self.num_steps, self.calls, self.rates = 0, [], []
        self._sizes, self._settings, self._segment, self._bad_at = (
            slot_sizes,
            settings,
            segment,
            bad_at,
        )
        self._offsets = np.cumsum([0, *slot_sizes[:-1]])[list(POSITIONS.slots)]

    def restore(self, weights):
        self.calls.append(("restore", weights.name))
        stored = open_model(weights, self._sizes)
        self._shapes, self.num_steps = stored.shapes, stored.step
        self._dense = {name: values.copy() for name, values in stored.weights.dense.items()}
        self._flat = np.append(
            self._dense["final_cross"][0, -NUM_DENSE:], self._dense["bias"]
        ).astype(np.float32)
        self._table = stored.weights.table[:, 0].copy()
        self._flat_sum, self._table_sum = (
            np.zeros(NUM_DENSE + 1, np.float32),
            np.zeros(len(self._table), np.float32),
        )
        if stored.moments:
            second = stored.moments[1]
            self._flat_sum = np.append(
                second.dense["final_cross"][0, -NUM_DENSE:], second.dense["bias"]
            ).astype(np.float32)
            self._table_sum = second.table[:, 0].copy()

    def save(self, folder):
        self.calls.append(("save", self.num_steps))
        with new_model(folder, self._shapes, step=self.num_steps) as stored:
            for name, values in self._dense.items():
                stored.weights.dense[name][:] = values
            for tensors, flat, table in (
                (stored.weights, self._flat, self._table),
                (stored.moments[1], self._flat_sum, self._table_sum),
            ):
                tensors.dense["final_cross"][0, -NUM_DENSE:], tensors.dense["bias"][:] = (
                    flat[:NUM_DENSE],
                    flat[NUM_DENSE:],
                )
                tensors.table[:, 0] = table

    def segment_batches(self, batch_size):
        return self._segment

    def train(self, rows, order, *, batch_size, seed, rate=None):
        self.calls.append(("train", np.array(order), batch_size, seed))
        rate = rate or (lambda step: self._settings.learning_rate)
        losses = []
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            keys, inputs = (
                rows.ids[batch] + self._offsets,
                np.append(rows.dense[batch], np.ones((len(batch), 1)), 1),
            )
            labels = rows.labels[batch].astype(np.float64)
            p = self._probabilities(keys, inputs)
            losses.append(-np.mean(labels * np.log(p) + (1 - labels) * np.log1p(-p)))
            error = (p - labels) / len(batch)
            self.rates.append(rate(self.num_steps + 1))
            self._flat, self._flat_sum = self._stepped(self._flat, self._flat_sum, error @ inputs)
            gradient = np.bincount(
                keys.ravel(), np.repeat(error, len(self._offsets)), len(self._table)
            )
            self._table, self._table_sum = self._stepped(self._table, self._table_sum, gradient)
            self.num_steps += 1
            if self.num_steps == self._bad_at:
                self._flat[:] = np.nan
        return float(np.mean(losses))

    def score(self, rows):
        inputs = np.append(rows.dense, np.ones((len(rows), 1)), 1)
        return self._probabilities(rows.ids + self._offsets, inputs).astype(np.float32)

    def close(self):
        self.calls.append(("close",))

    def _probabilities(self, keys, inputs):
        logits = self._table[keys].sum(1, dtype=np.float64) + inputs @ self._flat.astype(np.float64)
        return 1 / (1 + np.exp(-logits))

    def _stepped(self, values, sums, gradient):
        sums = (sums + gradient**2).astype(np.float32)
        change = self.rates[-1] * gradient / (np.sqrt(sums) + 1e-12)
        return (values - change).astype(np.float32), sums


class StopAfter:
    """A stop condition that is false for the first `looks` calls and true afterwards."""

    def __init__(self, looks):
        self.looks = looks

    def __call__(self):
        self.looks -= 1
        return self.looks < 0


class TimedEngine(LogisticEngine):
    """Engine whose `train` takes ten seconds, and whose save takes one second.

    `saves` contains the times at which a save ended.
    """

    def __init__(self, *arguments, clock, **keywords):
        super().__init__(*arguments, **keywords)
        self._clock, self.saves = clock, []

    def train(self, *arguments, **keywords):
        self._clock.advance(10)
        return super().train(*arguments, **keywords)

    def save(self, folder):
        super().save(folder)
        self._clock.advance(1)
        self.saves.append(self._clock())


def fitted(training_set, settings, path, start=None, lines=None, engine=None, **keywords):
    """Run a fit with checkpoints at `path`, and return result, engine and output lines."""
    lines = [] if lines is None else lines
    engine = engine or LogisticEngine(training_set.slot_sizes, settings)
    job = FitJob(
        training_set=training_set,
        config=CONFIG,
        settings=settings,
        start=start,
        checkpoint_path=path,
    )
    return fit(job, engine, emit=lines.append, **keywords), engine, lines


def content(folder):
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def trained_rows(engine, first=0):
    """Return the row numbers of each call of `train`, without the first `first` calls."""
    return [call[1] for call in engine.calls if call[0] == "train"][first:]
