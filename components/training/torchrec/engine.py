"""The TorchRec engine: several worker processes share each batch, the rows and the tables.

One process, the leader, runs the fit. All workers, including the leader, execute the calls that the
leader broadcasts (`follow`). Rows stay where they were decoded: each of N workers reads every Nth
row group. Each row of a batch is used by the worker that decoded the row. Therefore a batch is the
same for any number of workers, and so is the model, except for rounding. Every worker has the dense
parameters, and `DistributedDataParallel` sums their gradients. `tables` shards the tables and
computes their steps.

If a worker is lost, all workers end. The leader raises a `TemporaryError`, and a new group of any
size continues from the last save. Dropout draws from each worker's own generator, so with dropout
the model depends on the number of workers.
"""

import itertools
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from components.training.device_memory import device_memory_reported
from components.training.engine import Rate
from components.training.rows import RowFolder, Rows, Share, open_rows
from components.training.torch_parts import (
    SEGMENT_ROWS,
    Adam,
    DensePart,
    made_ahead,
    require_tables,
)
from components.training.torchrec.tables import (
    COLUMN_WISE,
    TABLE_WISE,
    Sharder,
    begin_group,
    group_device,
    kernels_of,
    planner_of,
    require_kernels,
    table_collection,
    topology_here,
    with_own_rows,
)
from evergreen.config.features import FeaturePositions
from evergreen.config.model import NetworkConfig
from evergreen.config.training import TrainingSettings
from evergreen.contracts.workflow import PADDING_ID
from evergreen.networks.files import (
    StoredModel,
    chunks,
    new_model,
    num_rows,
    one_id_per_slot,
    open_model,
    spans_of,
    table_shapes,
    tables_of,
)
from evergreen.networks.network import build_network
from evergreen.networks.scoring import BATCH_ROWS
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError

_GATHERED_LABELS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class SharedEngine:
    """Arguments with which every worker creates its part of an engine."""

    config: NetworkConfig
    slot_sizes: tuple[int, ...]
    settings: TrainingSettings
    positions: FeaturePositions
    sharding: tuple[str, ...]
    """Sharding types that TorchRec's planner may use."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Optimizer steps of one call of `train`."""

    order: NDArray[np.int64]
    """Row numbers of the training rows, in training order. Rows are numbered over all workers."""
    batch_size: int
    rates: list[float]
    """Learning rate of each step."""
    scales: list[float]
    """Factor of each step, 1 divided by the sum of the batch's weights. A row's share of the
    batch's loss is its weight times this factor."""
    seed: int


@dataclass(frozen=True, kw_only=True, eq=False)
class _Part:
    """One worker's share of a batch, B rows."""

    labels: Tensor
    weights: Tensor
    """Share of each row in the batch's loss."""
    dense: Tensor
    features: KeyedJaggedTensor


class _Model(nn.Module):
    """The sharded tables and the network."""

    def __init__(
        self, tables: nn.Module, network: nn.Module, config: NetworkConfig, *, precision: str
    ) -> None:
        super().__init__()
        self.tables, self.network = tables, network
        self._config, self._is_short = config, precision == "bfloat16"

    def forward(self, dense_BD: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """Return the logits, [B]."""
        found = self.tables(features).to_dict()
        vectors = [found[str(i)] for i in range(self._config.num_categorical)]
        # Vectors of different widths are concatenated, see `Network`. A worker may have none of the
        # batch's rows.
        vectors_BFE = (
            torch.cat(vectors, dim=1).unsqueeze(1)
            if self._config.widths
            else torch.stack(vectors, dim=1)
        )
        with torch.autocast(
            dense_BD.device.type, torch.bfloat16, enabled=self._is_short and self.training
        ):
            logits_B: Tensor = self.network(dense_BD, vectors_BFE)
        return logits_B.float()


class _Worker:
    """Part of an engine in one process. All workers make the same calls in the same order."""

    def __init__(self, shared: SharedEngine) -> None:
        config, settings = shared.config, shared.settings
        self._shared, self._settings = shared, settings
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._device = group_device()
        torch.backends.cuda.matmul.allow_tf32 = settings.precision == "tf32"
        self._spans = spans_of(shared.positions)
        self._tables = tables_of(shared.positions, config.widths)
        collection = table_collection(shared.slot_sizes, shared.positions, config)
        self.network = build_network(config).to(self._device)
        model, sharders = (
            _Model(collection, self.network, config, precision=settings.precision),
            [Sharder()],
        )
        batch_size, topology = (
            -(-settings.batch_size // self.size),
            topology_here(self.size, self._device),
        )
        planner = planner_of(topology, collection, batch_size=batch_size, sharding=shared.sharding)
        group = dist.distributed_c10d._get_default_group()
        self.plan = with_own_rows(planner.collective_plan(model, sharders, group))
        self._model = DistributedModelParallel(
            model, ShardingEnv.from_process_group(group), self._device, self.plan, sharders
        )
        self._kernels = list(kernels_of(self._model))
        self._parts = {key: part for kernel in self._kernels for key, part in kernel.parts.items()}
        self._dense = DensePart(self.network)
        self._rows: Rows | None = None
        self.num_steps = 0

    @torch.no_grad()
    def restore(self, weights: Path) -> None:
        """Load the dense parameters and this worker's shards of the tables."""
        shared = self._shared
        stored = open_model(weights, shared.slot_sizes)
        self._dense.restore(stored)
        require_tables(stored, self._table_shapes, weights)
        slots = [each.slots(shared.slot_sizes, self._tables) for each in stored.parts]
        for (slot, column), rows in self._parts.items():
            rows.zero_()
            for number, values in enumerate(slots):
                for part in chunks(0, len(rows)):
                    values_here = values[slot][part, column : column + rows.shape[2]]
                    rows[part, number] = torch.from_numpy(np.ascontiguousarray(values_here)).to(
                        self._device
                    )
        self.num_steps = stored.step

    @property
    def _table_shapes(self) -> list[tuple[int, int]]:
        shared = self._shared
        return list(zip(num_rows(self._tables, shared.slot_sizes), shared.config.table_widths))

    def new_model(self, folder: Path) -> Any:
        """Create empty model files in `folder`. The contents are written by `save`."""
        shapes = table_shapes(self._table_shapes) | self._dense.shapes
        return new_model(folder, shapes, step=self.num_steps)

    def save(self, stored: StoredModel | None = None) -> None:
        """Send this worker's shards to the leader in chunks.

        The leader passes `stored`, and writes the shards and the dense parameters into this model.
        """
        if stored:
            self._dense.save(stored)
        slots = (
            [each.slots(self._shared.slot_sizes, self._tables) for each in stored.parts]
            if stored
            else []
        )
        (shards,) = self.plan.plan.values()
        for name, sharding in shards.items():
            for shard in sharding.sharding_spec.shards:
                (_, column), (count, width) = shard.shard_offsets, shard.shard_sizes
                for part in chunks(0, count):
                    values = self._chunk_of_shard(
                        int(name), column, part, width=width, of=shard.placement.rank()
                    )
                    for number, tables in enumerate(slots):
                        tables[int(name)][part, column : column + width] = values[:, number].numpy()

    def _chunk_of_shard(
        self, slot: int, column: int, part: slice, *, width: int, of: int
    ) -> Tensor:
        """Send a chunk of a shard's rows from worker `of` to the leader, and return the chunk.

        Only worker `of` and the leader return the chunk. On all other workers, the result is
        undefined.
        """
        if self.rank == of:
            chunk = self._parts[slot, column][part].cpu().contiguous()
            if of != 0:
                dist.send(chunk, 0)
        else:
            chunk = torch.empty(part.stop - part.start, 3, width)
            if self.rank == 0:
                dist.recv(chunk, of)
        return chunk

    def open_rows(self, folders: Sequence[RowFolder], slot_sizes: list[int], cache: Path) -> Rows:
        """Decode this worker's row groups."""
        self._rows = open_rows(folders, slot_sizes, cache, share=Share(self.rank, self.size))
        return self._rows

    def gather_labels(self) -> None:
        """Send the labels and weights of all rows to the leader."""
        assert self._rows is not None, "rows are opened first"
        weights = [] if self._rows.weights is None else [self._rows.weights]
        for values in (self._rows.labels, *weights):
            for at in range(0, len(values), _GATHERED_LABELS):
                part = torch.from_numpy(values[at : at + _GATHERED_LABELS].copy())
                dist.reduce(part, 0)
                if self.rank == 0:
                    values[at : at + _GATHERED_LABELS] = part.numpy()

    def take(self, numbers: NDArray[np.int64]) -> Rows:
        """Return the rows with these numbers. Only the leader gets the complete rows."""
        assert self._rows is not None, "rows are opened first"
        selected = self._rows.take(numbers)
        for values in filter(np.size, (selected.dense, selected.ids)):
            dist.reduce(
                torch.from_numpy(values), 0
            )  # workers that lack a row have zeros in its place
        return selected

    def train(self, steps: Steps, sent: Rows | None = None) -> Any:
        """Take the steps with this worker's rows and return each batch's loss, float32 [steps].

        If rows are passed in `sent`, all workers have the same rows, and each worker uses every Nth
        row.
        """
        rows = self._rows if sent is None else sent
        assert rows is not None, "rows are opened first"
        self._model.train()
        losses = []
        devices = [self._device] if self._device.type == "cuda" else []
        with (
            torch.random.fork_rng(devices),
            closing(made_ahead(self._batches(rows, steps), 1)) as made,
        ):
            torch.manual_seed(steps.seed + self.rank)
            for batch, rate in zip(made, steps.rates):
                losses.append(self._step(batch, rate))
        found = torch.stack(losses) if losses else torch.zeros(0)
        dist.all_reduce(found)
        return found.cpu().numpy()

    def _batches(self, rows: Rows, steps: Steps) -> Iterator[_Part]:
        for number, scale in enumerate(steps.scales):
            part = steps.order[number * steps.batch_size :][: steps.batch_size]
            if rows.group_starts is not None:
                owners = np.searchsorted(rows.group_starts, part, side="right") - 1
            else:
                owners = part
            part = part[owners % self.size == self.rank]
            weights = (
                np.full(len(part), scale)
                if rows.weights is None
                else rows.weights.take(part) * scale
            )
            yield _Part(
                labels=torch.from_numpy(rows.labels.take(part)).to(self._device),
                weights=torch.from_numpy(weights.astype(np.float32)).to(self._device),
                dense=torch.from_numpy(rows.dense.take(part, axis=0)).to(self._device),
                features=self._features(rows.ids.take(part, axis=0)),
            )

    def _step(self, part: _Part, rate: float) -> Tensor:
        """Take one step together with all workers and return this worker's share of the loss."""
        self.network.zero_grad(set_to_none=True)
        logits = self._model(part.dense, part.features)
        loss = binary_cross_entropy_with_logits(logits, part.labels, part.weights, reduction="sum")
        # TorchRec and DistributedDataParallel divide all gradients by the number of workers.
        (loss * self.size).backward()
        self.num_steps += 1
        adam = Adam(self._settings, self.num_steps, rate)
        with torch.no_grad():
            self._dense.step(adam, [each.grad for each in self._dense.weights.values()])
        for kernel in self._kernels:
            kernel.step(adam)
        return loss.detach()

    def _features(self, ids: NDArray[np.int32]) -> KeyedJaggedTensor:
        """Return the look-ups of rows with these `ids`.

        A list's look-ups have weights, so that their weighted sum is the pooled vector.
        """
        values, lengths, weights = [], [], []
        for start, stop, pool in self._spans:
            of_span = ids[:, start:stop]
            known = (of_span >= 0) & (
                of_span < self._shared.slot_sizes[self._shared.positions.slots[start]]
            )
            share = np.ones(of_span.shape, np.float32)
            if pool is not None:
                is_there = of_span != PADDING_ID
                known &= is_there
                if pool == "mean":
                    share /= is_there.sum(1, keepdims=True).clip(1)
            values.append(of_span[known])
            lengths.append(known.sum(1))
            weights.append(share[known])
        return KeyedJaggedTensor(
            keys=[str(i) for i in range(len(self._spans))],
            values=torch.from_numpy(np.concatenate(values).astype(np.int64)),
            lengths=torch.from_numpy(np.concatenate(lengths).astype(np.int64)),
            weights=torch.from_numpy(np.concatenate(weights)),
        ).to(self._device)

    @torch.no_grad()
    def score(self, dense: NDArray[np.float32], ids: NDArray[np.int32]) -> Any:
        """Return click probabilities, float32 [n].

        All workers get the same rows, and each scores a part of them.
        """
        per_worker = -(-len(ids) // self.size)
        part = slice(self.rank * per_worker, (self.rank + 1) * per_worker)
        self._model.eval()
        logits = self._model(
            torch.from_numpy(dense[part]).to(self._device), self._features(ids[part])
        )
        found = torch.zeros(len(ids))
        found[part] = torch.sigmoid(logits).cpu()
        dist.all_reduce(found)
        return found.numpy()


_CHECKED = {"restore", "open_rows"}
"""Calls in which each worker reads files and does not communicate. If a call fails in one worker,
the error is sent to the other workers."""
_FAILURE = "failure of a worker"
"""Key in the group's store under which a worker writes its error before it ends."""
_FAILURE_READ = "failure was read"
"""Key that the leader sets after it has read the error."""
_LEADER_SECONDS = 20.0
"""Maximum seconds that a worker waits for the leader to read the error."""
_WORKERS: dict[int, _Worker] = {}
"""Workers of this process, by engine. Engines are numbered from 0."""
_NUMBERS = itertools.count()


def _execute(number: int, name: str, arguments: tuple[Any, ...]) -> Any:
    """Execute this process's part of a call.

    Raises:
        PermanentError: the GPU has too little memory, or a file cannot be read.
    """
    shared: SharedEngine = arguments[0] if name == "begin" else _WORKERS[number]._shared
    with device_memory_reported(
        shared.config,
        shared.slot_sizes,
        batch_size=shared.settings.batch_size,
        positions=shared.positions,
    ):
        return _executed(number, name, arguments)


def _executed(number: int, name: str, arguments: tuple[Any, ...]) -> Any:
    if name == "begin":
        _WORKERS[number] = _Worker(*arguments)
        return None
    if name == "close":
        del _WORKERS[number]
        return None
    call: Callable[..., Any] = getattr(_WORKERS[number], name)
    if name not in _CHECKED:
        return call(*arguments)
    result, failure = None, None
    try:
        result = call(*arguments)
    except (ContractError, PermanentError, OSError) as error:
        failure = error
    failures: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    if dist.get_rank() == 0:
        for each in filter(None, failures):
            raise each
    return result


def follow() -> None:
    """Execute the calls that the leader broadcasts, until the leader ends.

    Raises:
        TemporaryError: a worker was lost.
        PermanentError: a GPU has too little memory. The leader raises the same error.
    """
    begin_group()
    # Only the leader handles SIGTERM. The leader needs this worker for the save.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with _lost_workers_reported():
        while (call := _broadcast(None)) is not None:
            try:
                _execute(*call)
            except PermanentError as error:
                store = _group_store()
                store.set(_FAILURE, str(error))
                dist.destroy_process_group()  # ends the collective call of the leader
                _wait_for_leader(store)
                raise
    dist.destroy_process_group()


def end_group() -> None:
    """End the other workers and the process group. Only the leader calls this function."""
    _broadcast(None)
    dist.destroy_process_group()


def _broadcast(call: Any) -> Any:
    box = [call]
    dist.broadcast_object_list(box, 0)
    return box[0]


def _group_store() -> Any:
    """Return the store through which the workers found each other. The store outlives a worker."""
    return dist.distributed_c10d._get_default_store()


def _wait_for_leader(store: Any) -> None:
    """Wait until the leader has read the error of a failed worker.

    The launcher sends SIGTERM to the leader as soon as a worker ends.
    """
    with suppress(RuntimeError):
        store.wait([_FAILURE_READ], timedelta(seconds=_LEADER_SECONDS))


@contextmanager
def _lost_workers_reported() -> Iterator[None]:
    """Raise the error of a lost worker, or a TemporaryError if the worker wrote no error."""
    try:
        yield
    except RuntimeError as error:
        if "gloo" not in str(error) and not isinstance(error, dist.DistError):
            raise
        with suppress(RuntimeError):
            store = _group_store()
            if store.check([_FAILURE]):
                failure = store.get(_FAILURE).decode()
                if dist.get_rank() == 0:
                    # After a failure, the launcher sends SIGTERM, which must not count as a
                    # preemption.
                    if threading.current_thread() is threading.main_thread():
                        signal.signal(signal.SIGTERM, signal.SIG_IGN)
                    store.set(_FAILURE_READ, "")
                else:
                    _wait_for_leader(store)
                raise PermanentError(failure) from error
        raise TemporaryError(
            "a worker was lost; the same command continues from the last save, with any number of "
            "processes"
        ) from error


class _SharedRows(Rows):
    """Rows that are divided among the workers. The leader has all labels and weights."""

    engine: "TorchrecEngine"

    def take(self, numbers: NDArray[np.int64]) -> Rows:
        """See `Rows`."""
        selected: Rows = self.engine._call("take", numbers)
        return replace(
            selected,
            labels=self.labels[numbers],
            weights=None if self.weights is None else self.weights[numbers],
        )


class TorchrecEngine:
    """Implementation of `components.training.engine.Engine`, which runs in the leader."""

    backend = "torchrec"

    def __init__(
        self,
        config: NetworkConfig,
        slot_sizes: Sequence[int],
        settings: TrainingSettings,
        *,
        positions: FeaturePositions | None = None,
        sharding: Sequence[str] = (TABLE_WISE, COLUMN_WISE),
    ) -> None:
        """Create an engine on all workers. All tables are zero. `restore` loads weights.

        Args:
            config: Configuration of the network.
            slot_sizes: Number of ids of each slot.
            settings: Settings of the fit.
            positions: Slot of each categorical position, and the positions of each list. If None,
                each slot is looked up once.
            sharding: Sharding types that TorchRec's planner may use.

        Raises:
            PermanentError: FBGEMM was built for another device.
        """
        require_kernels(group_device())
        self._leads = begin_group()
        self._settings, self._number = settings, next(_NUMBERS)
        self._opened: Rows | None = None
        self.num_steps, self._is_broken = 0, False
        shared = SharedEngine(
            config=config,
            slot_sizes=tuple(slot_sizes),
            settings=settings,
            positions=positions or one_id_per_slot(slot_sizes),
            sharding=tuple(sharding),
        )
        self._call("begin", shared)

    @property
    def _worker(self) -> _Worker:
        return _WORKERS[self._number]

    def _call(self, name: str, *arguments: Any, own: tuple[Any, ...] | None = None) -> Any:
        """Execute a call on all workers, and return the leader's result.

        Args:
            name: Name of the method of `_Worker`.
            *arguments: Arguments of the call.
            own: Arguments for the leader, if they differ from the arguments of the other workers.
        """
        with _lost_workers_reported():
            _broadcast((self._number, name, arguments))
            try:
                return _execute(self._number, name, arguments if own is None else own)
            except Exception:
                self._is_broken = name not in _CHECKED
                raise

    def restore(self, weights: Path) -> None:
        """See `Engine`. Every worker reads the folder."""
        self._call("restore", weights)
        self.num_steps = self._worker.num_steps

    def save(self, folder: Path) -> None:
        """See `Engine`. Only the leader writes files."""
        with self._worker.new_model(folder) as stored:
            self._call("save", own=(stored,))

    def segment_batches(self, batch_size: int) -> int:
        """See `Engine`."""
        return max(1, SEGMENT_ROWS[group_device().type] // batch_size)

    def open_rows(self, folders: Sequence[RowFolder], slot_sizes: list[int], cache: Path) -> Rows:
        """See `Engine`.

        Each worker decodes its share of the row groups into `cache` on its own machine.
        """
        rows = self._call("open_rows", folders, slot_sizes, cache)
        self._call("gather_labels")
        self._opened = shared = _SharedRows(**vars(rows))
        object.__setattr__(shared, "engine", self)
        return shared

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

        If `rows` are not from `open_rows`, the rows of `order` are sent to all workers.
        """
        sent = None
        if rows is not self._opened:
            sent = replace(rows.take(order), group_starts=None)
            rows, order = sent, np.arange(len(order))
        parts = [order[at : at + batch_size] for at in range(0, len(order), batch_size)]
        weights = rows.weights
        if weights is not None:
            parts = [part for part in parts if weights[part].any()]
        if not parts:
            return 0.0
        scales = [
            1 / (len(part) if weights is None else weights[part].sum(dtype=np.float64))
            for part in parts
        ]
        first, rate = self.num_steps + 1, rate or (lambda step: self._settings.learning_rate)
        steps = Steps(
            order=np.concatenate(parts),
            batch_size=batch_size,
            rates=[rate(first + number) for number in range(len(parts))],
            scales=scales,
            seed=seed,
        )
        losses = self._call("train", steps, sent)
        self.num_steps += len(parts)
        return float(losses.mean())

    def score(self, rows: Rows) -> NDArray[np.float32]:
        """See `Engine`."""
        at_once = BATCH_ROWS * dist.get_world_size()
        parts = [rows[at : at + at_once] for at in range(0, len(rows), at_once)]
        found = [self._call("score", part.dense, part.ids) for part in parts]
        return np.concatenate([np.empty(0, np.float32), *found])

    def close(self) -> None:
        """See `Engine`. If this engine created the group, the other workers end.

        After an error in a call, other workers may wait in that call. These workers cannot receive
        another call and end only after this process has ended.
        """
        if self._is_broken:
            del _WORKERS[self._number]
            return
        with suppress(TemporaryError):
            self._call("close")
            if self._leads:
                end_group()
