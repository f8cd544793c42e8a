"""The PyTorch engine, for any network, on the available device.

Autograd computes the dense gradients. Gradients of the tables are summed for each row here, because
autograd would build a gradient for all rows of a table, and a batch touches only a few thousand. On
a CPU equal input gives equal bits. NumPy gathers and indexes the next batch in a separate thread
during the current step. `fit` decides which rows are used, in which order and how often.

Both optimizers are Adam as HugeCTR computes it. t is the number of steps taken, and g is the
gradient of the mean loss. The moments are m = b1 m + (1 - b1) g and v = b2 v + (1 - b2) g^2. The
step is w -= lr sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps). torch's Adam divides sqrt(v) by
sqrt(1 - b2^t) before it adds its epsilon. It gives the same result if its epsilon in step t is eps
/ sqrt(1 - b2^t). Table rows that a batch does not touch keep their weights and moments, as with
HugeCTR's `Update_t.Local` and torch.optim.SparseAdam.

Shape suffixes are as in `components.models.network`, and P places of a table
(`components.models.files.Table`), L look-ups of a batch in it, U distinct rows among them.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, embedding_bag
from torch.optim.adam import adam

from components.contracts.features import Places
from components.contracts.workflow import PADDING_ID
from components.models.configs import NetworkConfig
from components.models.files import (
    Columns,
    StoredModel,
    chunks,
    columns_of,
    new_model,
    num_rows,
    one_each,
    open_model,
    spans_of,
    table_shapes,
    tables_of,
)
from components.models.network import Network, build_network, load_dense
from components.models.scoring import Scorer, side_by_side
from components.runtime.errors import ContractError
from components.training.config import TrainingSettings
from components.training.engine import Rate
from components.training.rows import Rows, open_rows

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Rows of one step, B of them, and the table rows that they look up."""

    labels: Tensor
    """0 or 1, float32 [B]."""
    dense: Tensor
    """Dense values, float32 [B, D]."""
    lookups: "tuple[Lookups, ...]"
    """Look-ups in each table."""
    weights: Tensor | None = None
    """Share of each row in the batch's loss, float32 [B], or None if all are equal."""

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """Apply `function` to each tensor of the batch."""

        def mapped(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else function(tensor)

        return Batch(
            labels=function(self.labels),
            dense=function(self.dense),
            lookups=tuple(Lookups(*map(mapped, each)) for each in self.lookups),
            weights=mapped(self.weights),
        )


class Lookups(NamedTuple):
    """Rows of one table that a batch looks up, and the B * F vectors that they become."""

    table_rows: Tensor
    """Distinct rows of the table, ascending, int64 [U]."""
    taken: Tensor
    """Index in `table_rows` of each look-up, int32 [L], ordered by vector."""
    order: Tensor
    """Number of the vector of each look-up, int32 [L], ordered by table row."""
    starts: Tensor
    """Start of each table row's look-ups in `order`, int32 [U]."""
    bags: Tensor | None = None
    """Start of each vector's look-ups in `taken`, int32 [B * F]. None if each vector is one
    look-up."""
    shares: Tensor | None = None
    """Factor of the sum of each vector's look-ups, float32 [B * F, 1]. None if all factors are
    1."""


class TablePlaces(NamedTuple):
    """Places that look up in one table."""

    columns: Columns
    """Id columns of the table."""
    offsets: NDArray[np.int64]
    """Table row of id 0 (padding) of each place's slot, [P]."""
    places: Places

    def lookups(self, ids: NDArray[np.int32]) -> Lookups:
        """Return the look-ups of a batch of `ids`, [B, P].

        Padding of a list is not looked up.
        """
        keys = ids + self.offsets
        if not self.places.lists:
            return lookups_of(keys.ravel())
        spans = spans_of(self.places)
        is_there = ids != PADDING_ID
        is_there[:, [start for start, _, pool in spans if pool is None]] = True
        counts = np.add.reduceat(is_there, [start for start, *_ in spans], axis=1, dtype=np.int32)
        is_mean = np.array([pool == "mean" for *_, pool in spans])
        shares = (1 / np.where(is_mean, np.maximum(counts, 1), 1)).astype(np.float32)
        found, counts = lookups_of(keys[is_there]), counts.ravel()
        vector_of_lookup = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        return found._replace(
            order=torch.from_numpy(vector_of_lookup[found.order.numpy()]),
            bags=torch.from_numpy(np.cumsum(counts, dtype=np.int32) - counts),
            shares=torch.from_numpy(shares.reshape(-1, 1)),
        )


def assemble(rows: Rows, numbers: NDArray[np.int64], tables: Sequence[TablePlaces]) -> Batch:
    """Return the batch of some rows.

    Args:
        rows: All rows.
        numbers: Row numbers of the batch. At least one of these rows has a weight above 0.
        tables: Places of each table.
    """
    # ndarray.take copies whole rows. It takes 0.07 ms for 2048 rows, and indexing takes 0.27 ms.
    ids = rows.ids.take(numbers, axis=0)
    weights = None if rows.weights is None else rows.weights.take(numbers)
    return Batch(
        labels=torch.from_numpy(rows.labels.take(numbers)),
        dense=torch.from_numpy(rows.dense.take(numbers, axis=0)),
        lookups=tuple(each.lookups(ids[:, each.columns]) for each in tables),
        weights=None if weights is None else torch.from_numpy(weights / weights.sum(dtype=np.float64)).float(),
    )


def lookups_of(keys: NDArray[np.int64]) -> Lookups:
    """Return the look-ups of the table rows `keys`, one for each vector. `keys` is modified."""
    # Each key and its position are packed into one integer to sort them together. For 2048 x 26
    # keys np.sort of int64 takes 0.2 ms, torch.sort with positions 0.8 ms and np.argsort 2.4 ms.
    position_bits = max(1, int(len(keys) - 1).bit_length())
    keys <<= position_bits
    keys |= np.arange(len(keys))
    keys.sort()
    order = keys & ((1 << position_bits) - 1)
    keys >>= position_bits
    is_first = np.empty(len(keys), np.bool_)
    is_first[:1] = True
    np.not_equal(keys[1:], keys[:-1], out=is_first[1:])
    starts = np.flatnonzero(is_first)
    taken = np.empty(len(keys), np.int32)
    taken[order] = np.cumsum(is_first, dtype=np.int32) - 1
    return Lookups(
        table_rows=torch.from_numpy(keys[starts]),
        taken=torch.from_numpy(taken),
        order=torch.from_numpy(order.astype(np.int32)),
        starts=torch.from_numpy(starts.astype(np.int32)),
    )


@dataclass(frozen=True)
class Adam:
    """One step of the optimizer. The module's docstring has the formula."""

    settings: TrainingSettings
    number: int
    """Number of the step, from 1."""
    rate: float

    def step(self, weights: list[Tensor], gradients: list[Tensor], *, m: list[Tensor], v: list[Tensor]) -> None:
        """Update `weights`, `m` and `v` in place."""
        settings = self.settings
        adam(
            weights,
            gradients,
            m,
            v,
            max_exp_avg_sqs=[],
            # torch increments the step number before it computes the step.
            state_steps=[torch.tensor(float(self.number - 1), device=each.device) for each in weights],
            foreach=False,
            capturable=False,
            differentiable=False,
            fused=True,
            amsgrad=False,
            beta1=settings.beta1,
            beta2=settings.beta2,
            lr=self.rate,
            weight_decay=0.0,
            eps=settings.epsilon / (1 - settings.beta2**self.number) ** 0.5,
            maximize=False,
        )


class DensePart:
    """Parameters of a network, and the two moments of each."""

    def __init__(self, network: Network) -> None:
        """Start with moments of zero."""
        self._network = network
        self.weights = dict(network.named_parameters())
        self._moments = [[torch.zeros_like(each) for each in self.weights.values()] for _ in range(2)]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter by name."""
        return {name: tuple(each.shape) for name, each in self.weights.items()}

    def restore(self, stored: StoredModel) -> None:
        """Load the stored parameters and moments. Moments that are not stored become zero."""
        load_dense(self._network, stored.weights.dense)
        for number, into in enumerate(self._moments):
            for name, target in zip(self.weights, into):
                target.copy_(torch.from_numpy(stored.moments[number].dense[name])) if stored.moments else target.zero_()

    def save(self, stored: StoredModel) -> None:
        """Write the parameters and moments into `stored`."""
        for tensors, values in zip(stored.parts, [[each.detach() for each in self.weights.values()], *self._moments]):
            for name, each in zip(self.weights, values):
                tensors.dense[name][:] = each.cpu().numpy()

    def step(self, adam: Adam, gradients: list[Tensor]) -> None:
        """Update the parameters and moments in place."""
        adam.step(list(self.weights.values()), gradients, m=self._moments[0], v=self._moments[1])


def require_tables(stored: StoredModel, shapes: Sequence[tuple[int, int]], folder: Path) -> None:
    """Check the shapes of the tables in `folder`.

    Raises:
        ContractError: they differ from `shapes`.
    """
    if (found := [each.shape for each in stored.weights.tables]) != shapes:
        raise ContractError(f"tables in {folder} have shapes {found}, expected {shapes}")


def made_ahead(source: Iterator[Item], depth: int) -> Generator[Item, None, None]:
    """Yield the items of `source` in order, while a thread prepares up to `depth` further items.

    Closing this iterator ends the thread. An error in `source` is raised here in place of the item.
    """
    pool = ThreadPoolExecutor(1, "prefetch")
    try:
        made = deque(pool.submit(next, source, None) for _ in range(depth))
        while (item := made.popleft().result()) is not None:
            made.append(pool.submit(next, source, None))
            yield item
    finally:
        pool.shutdown(cancel_futures=True)


SEGMENT_ROWS = {"cpu": 32_768, "cuda": 4_194_304}
"""Rows of one call of `learn`. On two cores it takes 0.1 s with the default network, and 1 s with
that of NVIDIA's sample."""
_BATCHES_AHEAD = {"cpu": 1, "cuda": 3}


class PytorchEngine:
    """Implementation of `components.training.engine.Engine` with PyTorch."""

    backend = "pytorch"
    open_rows = staticmethod(open_rows)

    def __init__(
        self,
        config: NetworkConfig,
        slot_sizes: Sequence[int],
        settings: TrainingSettings,
        *,
        device: str | None = None,
        places: Places | None = None,
    ) -> None:
        """Create an engine whose tables are all zero. `restore` loads weights.

        Args:
            config: Configuration of the network.
            slot_sizes: Number of ids of each slot.
            settings: Settings of the fit.
            device: torch's name of the device. None for the GPU, or the CPU if there is no GPU.
            places: Places that a row looks up. None to look up each slot once.
        """
        self._settings, self._slot_sizes = settings, list(slot_sizes)
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        # This flag applies to the whole process, which has one engine. If it is off, float32
        # products are exact.
        torch.backends.cuda.matmul.allow_tf32 = settings.precision == "tf32"
        self._network = build_network(config).to(self._device)
        self._dense = DensePart(self._network)
        self._tables = tables_of(places or one_each(slot_sizes), config.widths)
        self._rows = [
            _zeros((count, 3, width), self._device)
            for count, width in zip(num_rows(self._tables, slot_sizes), config.table_widths)
        ]
        """Vector, m and v of each row of each table. They are adjacent so that one operation reads
        or writes them. For the 34,000 distinct rows of a batch out of 10 million, this takes 1.6 ms
        on one core. Three separate tables take 3.2 ms."""
        self._places = [
            TablePlaces(columns, table.offsets(slot_sizes), table.places)
            for table, columns in zip(self._tables, columns_of(self._tables))
        ]
        self._rate: Rate = lambda step: settings.learning_rate
        vectors = [rows[:, 0] for rows in self._rows]
        self._scorer = Scorer(self._network, vectors, self._tables, slot_sizes=slot_sizes)
        self.num_steps = 0

    @property
    def _table_shapes(self) -> list[tuple[int, int]]:
        return [(len(rows), rows.shape[2]) for rows in self._rows]

    @torch.no_grad()
    def restore(self, weights: Path) -> None:
        """See `Engine`."""
        stored = open_model(weights, self._slot_sizes)
        self._dense.restore(stored)
        require_tables(stored, self._table_shapes, weights)
        for at, rows in enumerate(self._rows):
            rows.zero_()
            for part in chunks(0, len(rows)):
                for number, tensors in enumerate(stored.parts):
                    rows[part, number] = torch.from_numpy(tensors.tables[at][part]).to(self._device)
        self.num_steps = stored.step

    def save(self, folder: Path) -> None:
        """See `Engine`."""
        shapes = table_shapes(self._table_shapes) | self._dense.shapes
        with new_model(folder, shapes, step=self.num_steps) as stored:
            self._dense.save(stored)
            for number, tensors in enumerate(stored.parts):
                for rows, table in zip(self._rows, tensors.tables):
                    for part in chunks(0, len(rows)):
                        table[part] = rows[part, number].cpu().numpy()

    def segment_batches(self, batch_size: int) -> int:
        """See `Engine`."""
        return max(1, SEGMENT_ROWS[self._device.type] // batch_size)

    def learn(
        self, rows: Rows, order: NDArray[np.int64], *, batch_size: int, seed: int, rate: Rate | None = None
    ) -> float:
        """See `Engine`."""
        self._rate = rate or (lambda step: self._settings.learning_rate)
        parts = (order[at : at + batch_size] for at in range(0, len(order), batch_size))
        if rows.weights is not None:
            weights = rows.weights
            parts = (part for part in parts if weights[part].any())
        batches = (self._on_device(assemble(rows, part, self._places)) for part in parts)
        self._network.train()
        # Dropout draws from torch's generators. Their state is restored afterwards, because they
        # belong to the caller.
        with (
            torch.random.fork_rng([self._device] if self._device.type == "cuda" else []),
            closing(made_ahead(batches, _BATCHES_AHEAD[self._device.type])) as assembled,
        ):
            torch.manual_seed(seed)
            losses = [self._step(batch) for batch in assembled]
        return float(torch.stack(losses).mean()) if losses else 0.0

    def score(self, rows: Rows) -> NDArray[np.float32]:
        """See `Engine`."""
        probabilities: NDArray[np.float32] = self._scorer.probabilities(rows.dense, rows.ids)
        return probabilities

    def close(self) -> None:
        """See `Engine`."""
        del self._network, self._dense, self._rows, self._scorer

    def _on_device(self, batch: Batch) -> Batch:
        if self._device.type == "cpu":
            return batch
        return batch.map(lambda tensor: tensor.pin_memory().to(self._device, non_blocking=True))

    def _step(self, batch: Batch) -> Tensor:
        """Take an optimizer step and return the batch's mean loss before it, in nats."""
        taken = [rows.index_select(0, of.table_rows) for rows, of in zip(self._rows, batch.lookups)]
        sums = [_summed_lookups(taken_U3E[:, 0], of).requires_grad_() for taken_U3E, of in zip(taken, batch.lookups)]
        vectors_BFE = side_by_side(
            [
                (each if of.shares is None else each * of.shares).view(len(batch.labels), -1, rows.shape[2])
                for each, of, rows in zip(sums, batch.lookups, self._rows)
            ],
            self._tables,
        )
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._settings.precision == "bfloat16"):
            logits_B = self._network(batch.dense, vectors_BFE)
        if batch.weights is None:
            loss = binary_cross_entropy_with_logits(logits_B.float(), batch.labels)
        else:
            loss = binary_cross_entropy_with_logits(logits_B.float(), batch.labels, batch.weights, reduction="sum")
        gradients = torch.autograd.grad(loss, [*sums, *self._dense.weights.values()])
        to_sums, to_dense = gradients[: len(sums)], list(gradients[len(sums) :])
        self.num_steps += 1
        with torch.no_grad():
            adam = Adam(self._settings, self.num_steps, self._rate(self.num_steps))
            self._dense.step(adam, to_dense)
            for rows, of, taken_U3E, to_sums_VE in zip(self._rows, batch.lookups, taken, to_sums):
                if not len(of.table_rows):  # no categorical columns
                    continue
                # The look-ups are sorted by row, so the gradients of each row are one bag. This
                # takes 0.06 ms for 2048 x 26 look-ups of width 16, and index_add_ takes 0.3 ms.
                gradient_UE = embedding_bag(of.order, to_sums_VE, of.starts, mode="sum")
                vectors_UE, m_UE, v_UE = (part.contiguous() for part in taken_U3E.unbind(1))
                adam.step([vectors_UE], [gradient_UE], m=[m_UE], v=[v_UE])
                rows.index_copy_(0, of.table_rows, torch.stack([vectors_UE, m_UE, v_UE], dim=1))
        return loss.detach()


def _summed_lookups(vectors_UE: Tensor, of: Lookups) -> Tensor:
    """Return the sum of each vector's look-ups, [B * F, E]."""
    if of.bags is None:
        return vectors_UE.index_select(0, of.taken)
    return embedding_bag(of.taken, vectors_UE, of.bags, mode="sum")


def _zeros(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return zeros. On a CPU they take no memory until they are written.

    Rows are decoded before an engine is restored, so the memory is needed later.
    """
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, np.float32))
    return torch.zeros(shape, device=device)
