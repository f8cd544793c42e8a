"""Shard the tables with TorchRec, and train them with the same Adam as the other engines.

A slot's vectors are one table in TorchRec. Each vector of a row is a feature of TorchRec. A feature
is one look-up, or a list whose weighted sum is the pooled vector. TorchRec's planner assigns
tables, or some of their columns, to workers. Each step sends the ids to these workers once and the
pooled vectors back once. The gradients are sent to the same workers.

`AdamRows` computes the look-ups. `AdamRows` is a custom kernel of TorchRec. FBGEMM's fused Adam
cannot be used for two reasons. This Adam has no CPU build, and it adds epsilon after the bias
correction. All engines here add epsilon before the bias correction. A step only updates rows that
the batch looks up, like HugeCTR's `Update_t.Local`. The moments of a row are stored beside its
vector.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.nn.functional import embedding_bag
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv, ShardingPlan, ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from components.training.torch_parts import Adam, lookups_of
from evergreen.config.features import FeaturePositions
from evergreen.config.model import NetworkConfig
from evergreen.networks.files import spans_of
from evergreen.runtime.errors import PermanentError

TABLE_WISE, COLUMN_WISE = ShardingType.TABLE_WISE.value, ShardingType.COLUMN_WISE.value
_MIN_COLUMNS = 4
"""Minimum width of a shard if a table is sharded by columns."""


def table_collection(
    slot_sizes: Sequence[int], positions: FeaturePositions, config: NetworkConfig
) -> EmbeddingBagCollection:
    """Return the tables without allocating memory, one table for each slot.

    A table has one feature for each of its vectors in a row. The feature is named by the position
    of the vector.
    """
    slots = [positions.slots[start] for start, _, _ in spans_of(positions)]
    widths = dict(zip(slots, config.widths or [config.embedding_dim] * len(slots)))
    tables = [
        EmbeddingBagConfig(
            name=str(slot),
            num_embeddings=size,
            embedding_dim=widths[slot],
            feature_names=[str(i) for i, each in enumerate(slots) if each == slot],
        )
        for slot, size in enumerate(slot_sizes)
    ]
    return EmbeddingBagCollection(tables=tables, is_weighted=True, device=torch.device("meta"))


def topology_here(workers: int, device: torch.device) -> Topology:
    """Return a topology of `workers` workers, each with the memory of this worker."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", workers))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local
    if device.type == "cuda":
        return Topology(
            workers, device.type, torch.cuda.mem_get_info(device)[1], local_world_size=local
        )
    return Topology(workers, device.type, ddr_cap=memory, local_world_size=local)


def planner_of(
    topology: Topology, tables: EmbeddingBagCollection, *, batch_size: int, sharding: Sequence[str]
) -> EmbeddingShardingPlanner:
    """Return TorchRec's planner.

    Args:
        topology: The workers.
        tables: The tables to shard.
        batch_size: Rows of a batch on each worker.
        sharding: Sharding types that TorchRec's planner may use.
    """
    kernels = [EmbeddingComputeKernel.FUSED.value]
    chosen = ParameterConstraints(
        list(sharding), compute_kernels=kernels, min_partition=_MIN_COLUMNS
    )
    constraints = {table.name: chosen for table in tables.embedding_bag_configs()}
    return EmbeddingShardingPlanner(
        topology=topology, batch_size=batch_size, constraints=constraints
    )


class Sharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """Sharder of the collection.

    The sharder's optimizer is named Adam, so that the planner counts two moments for each weight.
    """

    def __init__(self) -> None:
        super().__init__(fused_params={"optimizer": EmbOptimType.ADAM})

    def shard(
        self, module: EmbeddingBagCollection, params: Any, env: ShardingEnv, *device_and_name: Any
    ) -> ShardedEmbeddingBagCollection:
        """Return the sharded collection, see TorchRec."""
        device, name = device_and_name
        return _SharedTables(module, params, env, self.fused_params, device, module_fqn=name)


def with_own_rows(plan: ShardingPlan) -> ShardingPlan:
    """Return the plan with `AdamRows` as the kernel of all tables."""
    for tables in plan.plan.values():
        for each in tables.values():
            each.compute_kernel = EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value
    return plan


class _SharedTables(ShardedEmbeddingBagCollection):  # type: ignore[misc]
    def _create_lookups(self) -> None:
        for sharding in self._embedding_shardings:
            configs = sharding._grouped_embedding_configs
            self._lookups.append(_Lookup(configs, device=self._device, pg=self._env.process_group))

    def reset_parameters(self) -> None:
        """Leave the weights unchanged.

        Fresh weights are restored from files like all other weights.
        """


class _Lookup(GroupedPooledEmbeddingsLookup):  # type: ignore[misc]
    def _create_embedding_kernel(
        self, config: GroupedEmbeddingConfig, device: torch.device | None, *_: Any
    ) -> "AdamRows":
        return AdamRows(config, device)


@dataclass(eq=False)
class _Group:
    """Rows with the same width from several tables, one table after another."""

    rows: Tensor
    """Vector, m and v of each row, [rows, 3, width]."""
    features: list[int]
    """Features of the kernel that look up rows of this group, by position."""
    offsets: Tensor
    """Index in `rows` of the first row of each feature's table."""
    last_lookups: tuple[Tensor, Tensor] | None = None
    """Distinct rows that the last batch looked up, and their vectors, which collect gradients."""


class AdamRows(nn.Module):
    """Custom kernel of TorchRec: the shards of one worker."""

    def __init__(self, config: GroupedEmbeddingConfig, device: torch.device | None) -> None:
        super().__init__()
        self.config = config
        self.parts: dict[tuple[int, int], Tensor] = {}
        """Vector, m and v of each shard's rows, [rows, 3, columns], by slot and first column."""
        self._groups = []
        first_feature = np.cumsum([0, *(table.num_features() for table in config.embedding_tables)])
        for width in sorted({table.local_cols for table in config.embedding_tables}):
            tables = [
                i for i, table in enumerate(config.embedding_tables) if table.local_cols == width
            ]
            counts = [config.embedding_tables[i].local_rows for i in tables]
            starts = np.cumsum([0, *counts])
            rows = torch.zeros(int(starts[-1]), 3, width, device=device)
            features: list[int] = []
            offsets: list[int] = []
            for i, start, count in zip(tables, starts, counts):
                table = config.embedding_tables[i]
                self.parts[int(table.name), table.local_metadata.shard_offsets[1]] = rows[
                    start : start + count
                ]
                features += range(first_feature[i], first_feature[i + 1])
                offsets += [int(start)] * table.num_features()
            self._groups.append(_Group(rows, features, torch.tensor(offsets, device=device)))

    def forward(self, features: Any) -> Tensor:
        """Return the pooled vectors of each row of the batch, concatenated over the features."""
        bounds, num_features, batch = (
            features.offset_per_key(),
            len(features.keys()),
            features.stride(),
        )
        lengths, values, weights = (
            features.lengths().view(num_features, batch),
            features.values(),
            features.weights(),
        )
        found: dict[int, Tensor] = {}
        for group in self._groups:
            spans = [slice(bounds[i], bounds[i + 1]) for i in group.features]
            counts = torch.tensor([each.stop - each.start for each in spans], device=values.device)
            keys = _side_by_side(values, spans) + group.offsets.repeat_interleave(counts)
            rows, inverse, *_ = lookups_of(keys)
            vectors = group.rows.index_select(0, rows)[:, 0].contiguous()
            if torch.is_grad_enabled():
                group.last_lookups = rows, vectors.requires_grad_()
            ends = lengths[group.features].flatten().cumsum(0)
            pooled = embedding_bag(
                inverse.long(),
                vectors,
                torch.cat([ends.new_zeros(1), ends]).long(),
                mode="sum",
                per_sample_weights=_side_by_side(weights, spans),
                include_last_offset=True,
            )
            found |= dict(zip(group.features, pooled.view(len(spans), batch, -1)))
        return torch.cat([found[i] for i in range(num_features)], dim=1)

    def named_parameters_by_table(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return no parameters, because TorchRec must neither store nor move these rows."""
        return iter(())

    @torch.no_grad()
    def step(self, adam: Adam) -> None:
        """Update the rows that the last batch looked up."""
        for group in self._groups:
            assert group.last_lookups is not None, "forward is called first"
            (rows, looked_up), group.last_lookups = group.last_lookups, None
            if looked_up.grad is None or not len(rows):
                continue
            vectors, m, v = (
                part.contiguous() for part in group.rows.index_select(0, rows).unbind(1)
            )
            adam.step([vectors], [looked_up.grad], m=[m], v=[v])
            group.rows.index_copy_(0, rows, torch.stack([vectors, m, v], dim=1))


def _side_by_side(values: Tensor, spans: Sequence[slice]) -> Tensor:
    is_all = sum(each.stop - each.start for each in spans) == len(values)
    return values if is_all else torch.cat([values[each] for each in spans])


def kernels_of(module: nn.Module) -> Iterator[AdamRows]:
    """Yield the kernels with this worker's shards."""
    tables = (each for each in module.modules() if isinstance(each, _SharedTables))
    return (kernel for each in tables for lookup in each._lookups for kernel in lookup._emb_modules)


def require_kernels(device: torch.device) -> None:
    """Check that FBGEMM was built for this device.

    Raises:
        PermanentError: FBGEMM was built for another device.
    """
    if not torch._C._dispatch_has_kernel_for_dispatch_key(
        "fbgemm::permute_2D_sparse_data", device.type.upper()
    ):
        raise PermanentError(
            f"FBGEMM has no kernels for {device.type}, expected a build for this device (for CUDA, "
            "fbgemm-gpu instead of fbgemm-gpu-cpu)"
        )


def group_device() -> torch.device:
    """Return the worker's device: the GPU with its number on this machine, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def begin_group() -> bool:
    """Join the workers that torchrun started, or create a group with only this process.

    Returns False if this process is already in a group.
    """
    if dist.is_initialized():
        return False
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    # The timeout is long, because the leader may decode rows or write a table for hours. If a
    # worker ends, the other workers notice its closed connections.
    dist.init_process_group(backend, timeout=timedelta(days=1), **alone)
    return True
