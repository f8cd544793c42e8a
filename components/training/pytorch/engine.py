"""The PyTorch engine: what `engine` promises, for any network behind the seam, on the device that is there.

Dense gradients are autograd's. The table's are summed per row here, since autograd would build a gradient for all rows
of a table of which a batch touches a few thousand. On a CPU equal input gives equal bits. Batches are
gathered and indexed by NumPy in a thread of their own, while the step before computes; which rows are learned, in which
order and how often is `fit`'s.

Both optimizers are Adam as HugeCTR computes it: with t the number of steps taken and g the gradient of the mean loss,
m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; w -= lr sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps). torch's Adam
divides sqrt(v) by sqrt(1 - b2^t) before it adds its epsilon, so it is this one when its epsilon is
eps / sqrt(1 - b2^t) in step t. Rows of the table that a batch does not touch keep weights and moments: HugeCTR's
`Update_t.Local`, and torch.optim.SparseAdam.

Shape suffixes: as in `components.models.network`; P places of a table (`components.models.files.Table`), L look-ups
that a batch makes there, U distinct rows of it among them.
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

from components.config.features import Places
from components.config.model import NetworkConfig
from components.config.training import TrainingSettings
from components.contracts.workflow import PADDING_ID
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
from components.training.engine import Rate
from components.training.rows import Rows, open_rows

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Rows of one step, and which rows of the tables they look up. B rows."""

    labels: Tensor
    """0 or 1, float32 [B]."""
    dense: Tensor
    """Float32 [B, D]."""
    lookups: "tuple[Lookups, ...]"
    """Of each table."""
    weights: Tensor | None = None
    """Each row's share of the batch's loss, float32 [B]; None where all are equal."""

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """The batch with `function` applied to each tensor."""

        def mapped(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else function(tensor)

        return Batch(
            labels=function(self.labels),
            dense=function(self.dense),
            lookups=tuple(Lookups(*map(mapped, each)) for each in self.lookups),
            weights=mapped(self.weights),
        )


class Lookups(NamedTuple):
    """Which rows of one table a batch looks up, and into which of its B * F vectors each goes."""

    table_rows: Tensor
    """Distinct rows of the table, ascending, int64 [U]."""
    taken: Tensor
    """Which of `table_rows` each look-up takes, int32 [L]; look-ups of the first vector first."""
    order: Tensor
    """The vector of each look-up, int32 [L]; look-ups of the first of `table_rows` first."""
    starts: Tensor
    """Where in `order` the look-ups of each of `table_rows` begin, int32 [U]."""
    bags: Tensor | None = None
    """Where in `taken` the look-ups of each vector begin, int32 [B * F]; None = each vector is one look-up."""
    shares: Tensor | None = None
    """By what the sum of its look-ups is multiplied for each vector, float32 [B * F, 1]."""


class TablePlaces(NamedTuple):
    """The places that look up in one table."""

    columns: Columns
    """Of ids."""
    offsets: NDArray[np.int64]
    """The first row of the slot of each, which is that of padding, [P]."""
    places: Places

    def lookups(self, ids: NDArray[np.int32]) -> Lookups:
        """What a batch of `ids` [B, P] looks up; an element that a list does not have is not looked up."""
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
    """The batch of the rows `numbers`, not all of weight 0, which look up in `tables`."""
    # ndarray.take copies whole rows: 0.07 ms for 2048 of them, where indexing took 0.27.
    ids = rows.ids.take(numbers, axis=0)
    weights = None if rows.weights is None else rows.weights.take(numbers)
    return Batch(
        labels=torch.from_numpy(rows.labels.take(numbers)),
        dense=torch.from_numpy(rows.dense.take(numbers, axis=0)),
        lookups=tuple(each.lookups(ids[:, each.columns]) for each in tables),
        weights=None if weights is None else torch.from_numpy(weights / weights.sum(dtype=np.float64)).float(),
    )


def lookups_of(keys: NDArray[np.int64]) -> Lookups:
    """The look-ups of the rows `keys` of one table, which this changes."""
    # A key and its position in one integer sort together: np.sort of int64 took 0.2 ms for 2048 x 26 keys, torch.sort
    # with positions 0.8 ms, np.argsort 2.4 ms.
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
    """One step of the optimizer; see the module."""

    settings: TrainingSettings
    number: int
    """Of the step, from 1."""
    rate: float

    def step(self, weights: list[Tensor], gradients: list[Tensor], *, m: list[Tensor], v: list[Tensor]) -> None:
        """Moves `weights`, `m` and `v`, in place."""
        settings = self.settings
        adam(
            weights,
            gradients,
            m,
            v,
            max_exp_avg_sqs=[],
            # torch counts a step itself before it takes it.
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
    """A network's parameters and the two moments of each."""

    def __init__(self, network: Network) -> None:
        """The moments are zero."""
        self._network = network
        self.weights = dict(network.named_parameters())
        self._moments = [[torch.zeros_like(each) for each in self.weights.values()] for _ in range(2)]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of each parameter."""
        return {name: tuple(each.shape) for name, each in self.weights.items()}

    def restore(self, stored: StoredModel) -> None:
        """Takes over what is stored; without moments there they are zero."""
        load_dense(self._network, stored.weights.dense)
        for number, into in enumerate(self._moments):
            for name, target in zip(self.weights, into):
                target.copy_(torch.from_numpy(stored.moments[number].dense[name])) if stored.moments else target.zero_()

    def save(self, stored: StoredModel) -> None:
        """Writes all of it."""
        for tensors, values in zip(stored.parts, [[each.detach() for each in self.weights.values()], *self._moments]):
            for name, each in zip(self.weights, values):
                tensors.dense[name][:] = each.cpu().numpy()

    def step(self, adam: Adam, gradients: list[Tensor]) -> None:
        """Moves all of it, in place."""
        adam.step(list(self.weights.values()), gradients, m=self._moments[0], v=self._moments[1])


def require_tables(stored: StoredModel, shapes: Sequence[tuple[int, int]], folder: Path) -> None:
    """Raises ContractError where the tables in `folder` have others than these `shapes`."""
    if (found := [each.shape for each in stored.weights.tables]) != shapes:
        raise ContractError(f"tables in {folder} have shapes {found}, expected {shapes}")


def made_ahead(source: Iterator[Item], depth: int) -> Generator[Item, None, None]:
    """The items of `source` in their order, up to `depth` of them made by a thread before they are asked for.

    Closing this iterator ends the thread; what `source` raises is raised here, in place of its next item.
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
"""Rows of one call of `learn`: on two cores 0.1 s with the default network, 1 s with NVIDIA's sample."""
_BATCHES_AHEAD = {"cpu": 1, "cuda": 3}


class PytorchEngine:
    """Engine of `components.training.engine`, in PyTorch."""

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
        """Makes an engine whose tables are zero everywhere; `restore` gives it weights.

        `device` is torch's name of it; None = the GPU where there is one. Without `places` a row looks every slot up.
        """
        self._settings, self._slot_sizes = settings, list(slot_sizes)
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        # For the whole process, which has one engine; otherwise a float32 product is exact.
        torch.backends.cuda.matmul.allow_tf32 = settings.precision == "tf32"
        self._network = build_network(config).to(self._device)
        self._dense = DensePart(self._network)
        self._tables = tables_of(places or one_each(slot_sizes), config.widths)
        self._rows = [
            _zeros((count, 3, width), self._device)
            for count, width in zip(num_rows(self._tables, slot_sizes), config.table_widths)
        ]
        """Vector, m and v of each row of each table. Side by side they are fetched and stored at once: 1.6 ms of one
        core for the 34,000 distinct rows of a batch from 10 million, where three tables took 3.2."""
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
        # Dropout draws from torch's generators, which are the caller's again afterwards.
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
        """The batch's mean loss in nats (binary cross entropy), after a step against its gradient."""
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
                # Look-ups sorted by row make each row's gradients one bag: 0.06 ms for 2048 x 26 lookups of width 16,
                # where index_add_ took 0.3.
                gradient_UE = embedding_bag(of.order, to_sums_VE, of.starts, mode="sum")
                vectors_UE, m_UE, v_UE = (part.contiguous() for part in taken_U3E.unbind(1))
                adam.step([vectors_UE], [gradient_UE], m=[m_UE], v=[v_UE])
                rows.index_copy_(0, of.table_rows, torch.stack([vectors_UE, m_UE, v_UE], dim=1))
        return loss.detach()


def _summed_lookups(vectors_UE: Tensor, of: Lookups) -> Tensor:
    """The sum of each vector's look-ups, [B * F, E]."""
    if of.bags is None:
        return vectors_UE.index_select(0, of.taken)
    return embedding_bag(of.taken, vectors_UE, of.bags, mode="sum")


def _zeros(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Zeros, which on a CPU take memory only when they are written: rows are decoded before an engine is restored."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, np.float32))
    return torch.zeros(shape, device=device)
