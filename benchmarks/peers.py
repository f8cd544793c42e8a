"""Train the same network with our engine, plain PyTorch, DeepCTR-Torch and TorchRec.

Each library trains for one pass over the given rows, in shuffled batches with Adam at 0.001. After
the training, each library scores other rows. The rows are converted to the library's own form
before the measured time begins. `speed` measures time and quality.

Plain PyTorch has 26 `nn.Embedding` with dense gradients, and an `nn.EmbeddingBag` for each list.
The cross layers run one by one. The optimizer is `torch.optim.Adam`, and a `DataLoader` reads a
Dataset of arrays. On two cores, this Dataset delivers 201,000 rows/s, and a TensorDataset delivers
107,000 rows/s. Two worker processes would deliver 238,000 rows/s, but would take a core from the
training step, so no workers are used. Networks other than DCN are our own networks with an
`nn.EmbeddingBag` for each column.

PyTorch with sparse gradients differs from plain PyTorch in two points: its tables have
`sparse=True`, and `torch.optim.SparseAdam` trains them. The gradients of these tables then have
only the rows of the batch.

TorchRec follows `test_installation.py --cpu_only` of its repository: `DistributedModelParallel`
with an `EmbeddingBagCollection`, in a group of one process. The network is our network, so only the
embeddings differ. TorchRec gets its rows from `ArrayRows`. In TorchRec's example, large tables are
trained by SGD, and small tables by Adam. Two variants of TorchRec are therefore measured.
`TorchRec` keeps each table with dense gradients, and trains all parameters with `torch.optim.Adam`.
`TorchRec, fused Adagrad` trains the tables within the backward pass with FBGEMM's kernels, which
have no Adam for CPUs. Row-wise Adagrad has one state per row, and Adam has two states per weight.
`TorchRec, fused Adagrad` does less work, so our ratio to it has no target. TorchRec is left out for
networks with lists.

DeepCTR-Torch trains its DCN or DeepFM with its own `fit`, unchanged. DeepCTR-Torch has no DLRM.
Parts that our network lacks are disabled, because they would slow DeepCTR-Torch down: the linear
part (except DeepFM's) and the L2 penalties on whole tables. Lists are `VarLenSparseFeat` columns. A
list uses the vectors of another column if the recommender's file sets this option.
"""

import contextlib
import io
import threading
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from components.training.pytorch.engine import PytorchEngine
from components.training.rows import Rows
from evergreen.config.features import Features
from evergreen.config.model import DcnConfig, DeepFmConfig, NetworkConfig
from evergreen.config.training import TrainingSettings
from evergreen.contracts.criteo import CRITEO
from evergreen.contracts.workflow import PADDING_ID
from evergreen.networks.files import Tensors, open_model
from evergreen.networks.network import build_network, load_dense

_SCORED_ROWS = 8192
TORCHREC, FUSED_TORCHREC = "TorchRec", "TorchRec, fused Adagrad"
OTHER_OPTIMIZERS = (FUSED_TORCHREC,)
"""Peers that train the tables with an optimizer other than Adam."""
_ADAGRAD_RATE = 0.01


class Trainer(Protocol):
    """A network and its optimizer, either ours or a peer's."""

    name: str

    def prepare(self, rows: Rows) -> Any:
        """Convert `rows` to the usual input format of this library."""

    def train(self, prepared: Any) -> None:
        """Train for one pass over the rows."""

    def score(self, rows: Rows) -> NDArray[np.float32]:
        """Return the click probabilities [n]."""


@torch.no_grad()
def _score_by(model: nn.Module, rows: Rows) -> NDArray[np.float32]:
    """Return the probabilities [n] that a peer's network computes, chunk by chunk."""
    model.eval()
    dense, ids = torch.from_numpy(rows.dense), torch.from_numpy(rows.ids.astype(np.int64))
    parts = zip(dense.split(_SCORED_ROWS), ids.split(_SCORED_ROWS))
    scores: NDArray[np.float32] = torch.cat([model(d, i).sigmoid() for d, i in parts]).numpy()
    return scores


class Evergreen:
    """Our engine, from `components.training`."""

    def __init__(
        self,
        config: NetworkConfig,
        slot_sizes: list[int],
        weights: Path,
        *,
        batch_size: int,
        precision: str,
        features: Features = CRITEO,
    ) -> None:
        """Start from the model in the folder `weights`."""
        self.name = f"evergreen {precision}"
        self._batch_size, self._passes = batch_size, 0
        settings = TrainingSettings(precision=precision, learning_rate=0.001)
        self.engine = PytorchEngine(
            config, slot_sizes, settings, device="cpu", positions=features.positions
        )
        self.engine.restore(weights)

    def prepare(self, rows: Rows) -> Rows:
        """Prepare rows. See `Trainer.prepare`."""
        return rows

    def train(self, prepared: Rows) -> None:
        """Train for one pass. See `Trainer.train`."""
        self._passes += 1
        order = np.random.default_rng(self._passes).permutation(len(prepared))
        self.engine.train(prepared, order, batch_size=self._batch_size, seed=self._passes)

    def score(self, rows: Rows) -> NDArray[np.float32]:
        """Score rows. See `Trainer.score`."""
        return self.engine.score(rows)


class PlainDcn(nn.Module):
    """DCN v1 as in a tutorial."""

    def __init__(
        self,
        config: DcnConfig,
        weights: Tensors,
        slot_sizes: list[int],
        *,
        features: Features = CRITEO,
        is_sparse: bool = False,
    ) -> None:
        """Start from existing `weights`."""
        super().__init__()
        tables = torch.tensor(weights.table).split(slot_sizes)
        self.embeddings = nn.ModuleList(
            nn.Embedding.from_pretrained(table.clone(), freeze=False, sparse=is_sparse)
            for table in tables
        )
        self._num_plain, self._lists = len(features.categorical), features.positions.lists
        self.bags = nn.ModuleList()
        for positions in self._lists:
            weight = self.embeddings[features.positions.slots[positions.start]].weight
            self.bags.append(
                nn.EmbeddingBag(
                    *weight.shape, mode=positions.pool, padding_idx=PADDING_ID, sparse=is_sparse
                )
            )
            self.bags[-1].weight = weight
        self.cross_weights = nn.ParameterList(torch.tensor(weights.dense["cross_weight"]).unbind())
        self.cross_biases = nn.ParameterList(torch.tensor(weights.dense["cross_bias"]).unbind())
        tower: list[nn.Module] = []
        for i in range(len(config.tower)):
            layer = f"tower.{3 * i}"
            tower += [
                _linear(weights.dense[f"{layer}.weight"], weights.dense[f"{layer}.bias"]),
                nn.ReLU(),
            ]
            tower += [nn.Dropout(config.dropout)] if config.dropout else []
        self.tower = nn.Sequential(*tower)
        final = np.concatenate([weights.dense["final_tower"], weights.dense["final_cross"]], axis=1)
        self.final = _linear(final, weights.dense["bias"])

    def forward(self, dense_BD: Tensor, ids_BF: Tensor) -> Tensor:
        """Return the logits [B]."""
        vectors = [
            table(ids_BF[:, slot]) for slot, table in enumerate(self.embeddings[: self._num_plain])
        ]
        vectors += [
            bag(ids_BF[:, positions.start : positions.stop])
            for bag, positions in zip(self.bags, self._lists)
        ]
        x0 = x = torch.cat([*vectors, dense_BD], dim=1)
        for weight, bias in zip(self.cross_weights, self.cross_biases):
            x = x0 * (x @ weight).unsqueeze(1) + bias + x
        return self.final(torch.cat([self.tower(x0), x], dim=1)).squeeze(1)


class PlainNetwork(nn.Module):
    """One of our networks with an `nn.EmbeddingBag` for each column."""

    def __init__(
        self, network: nn.Module, slot_sizes: list[int], width: int, *, is_sparse: bool = False
    ) -> None:
        """Create initial vectors for `network`."""
        super().__init__()
        self.network = network
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(size, width, mode="sum", sparse=is_sparse) for size in slot_sizes
        )

    @classmethod
    def of(
        cls,
        config: NetworkConfig,
        weights: Tensors,
        slot_sizes: list[int],
        *,
        is_sparse: bool = False,
    ) -> "PlainNetwork":
        """Create the network from `weights`."""
        network = build_network(config)
        load_dense(network, weights.dense)
        model = cls(network, slot_sizes, config.embedding_dim, is_sparse=is_sparse)
        for bag, table in zip(model.bags, torch.tensor(weights.table).split(slot_sizes)):
            bag.weight = nn.Parameter(table.clone())
        return model

    def forward(self, dense_BD: Tensor, ids_BF: Tensor) -> Tensor:
        """Return the logits [B]."""
        vectors = [bag(ids_BF[:, slot : slot + 1]) for slot, bag in enumerate(self.bags)]
        logits: Tensor = self.network(dense_BD, torch.stack(vectors, dim=1))
        return logits


def _linear(weight: NDArray[np.float32], bias: NDArray[np.float32]) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight, layer.bias = nn.Parameter(torch.tensor(weight)), nn.Parameter(torch.tensor(bias))
    return layer


class ArrayRows(Dataset[Any]):
    """Dataset of single rows of arrays."""

    def __init__(self, rows: Rows) -> None:
        """Convert the ids to int64 for `nn.Embedding`."""
        self._dense, self._ids, self._labels = rows.dense, rows.ids.astype(np.int64), rows.labels

    def __len__(self) -> int:
        """Return the number of rows of the dataset."""
        return len(self._labels)

    def __getitem__(self, row: int) -> tuple[Any, Any, Any]:
        """Return dense values, ids and label of a row."""
        return self._dense[row], self._ids[row], self._labels[row]


class PlainPytorch:
    """Peer that trains with plain PyTorch. The module's docstring describes it."""

    def __init__(
        self,
        config: NetworkConfig,
        slot_sizes: list[int],
        weights: Path,
        *,
        batch_size: int,
        features: Features = CRITEO,
        is_sparse: bool = False,
    ) -> None:
        """Start from the model in the folder `weights`."""
        self.name = "PyTorch, sparse gradients" if is_sparse else "plain PyTorch"
        start = open_model(weights, slot_sizes).weights
        self.model = (
            PlainDcn(config, start, slot_sizes, features=features, is_sparse=is_sparse)
            if isinstance(config, DcnConfig)
            else PlainNetwork.of(config, start, slot_sizes, is_sparse=is_sparse)
        )
        tables = [
            each.weight
            for each in self.model.modules()
            if isinstance(each, (nn.Embedding, nn.EmbeddingBag)) and each.sparse
        ]
        tables = list(
            {id(each): each for each in tables}.values()
        )  # a list may use the table of another column
        sparse = {id(each) for each in tables}
        dense = [each for each in self.model.parameters() if id(each) not in sparse]
        self._optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(dense, lr=0.001)]
        if tables:
            self._optimizers.append(torch.optim.SparseAdam(tables, lr=0.001))
        self._loss = nn.BCEWithLogitsLoss()
        self._batch_size = batch_size

    def prepare(self, rows: Rows) -> ArrayRows:
        """Prepare rows. See `Trainer.prepare`."""
        return ArrayRows(rows)

    def train(self, prepared: ArrayRows) -> None:
        """Train for one pass. See `Trainer.train`."""
        self.model.train()
        for dense, ids, labels in DataLoader(prepared, batch_size=self._batch_size, shuffle=True):
            self.model.zero_grad()
            loss = self._loss(self.model(dense, ids), labels)
            loss.backward()
            for optimizer in self._optimizers:
                optimizer.step()

    def score(self, rows: Rows) -> NDArray[np.float32]:
        """Score rows. See `Trainer.score`."""
        return _score_by(self.model, rows)


class TorchrecExample:
    """Peer that trains with TorchRec. The module's docstring describes it.

    The model starts from its own initial weights.
    """

    def __init__(
        self,
        config: NetworkConfig,
        slot_sizes: list[int],
        *,
        batch_size: int,
        is_fused: bool = False,
    ) -> None:
        """Create the model, and a group of one process if there is no group yet."""
        import torch.distributed as dist
        from torchrec import EmbeddingBagCollection
        from torchrec.distributed.model_parallel import (
            DistributedModelParallel,
            get_default_sharders,
        )
        from torchrec.modules.embedding_configs import EmbeddingBagConfig
        from torchrec.optim import RowWiseAdagrad
        from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
        from torchrec.optim.keyed import KeyedOptimizerWrapper
        from torchrec.optim.optimizers import in_backward_optimizer_filter

        self.name = FUSED_TORCHREC if is_fused else TORCHREC
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        names = list(CRITEO.slots)
        tables = [
            EmbeddingBagConfig(
                name=name,
                embedding_dim=config.embedding_dim,
                num_embeddings=size,
                feature_names=[name],
            )
            for name, size in zip(names, slot_sizes)
        ]
        collection = EmbeddingBagCollection(tables, device=torch.device("meta"))
        if is_fused:
            apply_optimizer_in_backward(
                RowWiseAdagrad, collection.parameters(), {"lr": _ADAGRAD_RATE}
            )
        model, sharders = (
            _TorchrecModel(collection, build_network(config), names),
            get_default_sharders(),
        )
        plan = _planner(names, is_fused=is_fused).collective_plan(
            model, sharders, dist.distributed_c10d._get_default_group()
        )
        self.model: Any = DistributedModelParallel(
            model, device=torch.device("cpu"), plan=plan, sharders=sharders
        )
        self._optimizer = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(self.model.named_parameters())),
            lambda parameters: torch.optim.Adam(parameters, lr=0.001),
        )
        self._loss, self._batch_size = nn.BCEWithLogitsLoss(), batch_size

    def prepare(self, rows: Rows) -> ArrayRows:
        """Prepare rows. See `Trainer.prepare`."""
        return ArrayRows(rows)

    def train(self, prepared: ArrayRows) -> None:
        """Train for one pass. See `Trainer.train`."""
        self.model.train()
        for dense, ids, labels in DataLoader(prepared, batch_size=self._batch_size, shuffle=True):
            self._optimizer.zero_grad()
            loss = self._loss(self.model(dense, ids), labels)
            loss.backward()
            self._optimizer.step()

    def score(self, rows: Rows) -> NDArray[np.float32]:
        """Score rows. See `Trainer.score`."""
        return _score_by(self.model, rows)


def _planner(names: list[str], *, is_fused: bool) -> Any:
    """Return TorchRec's planner for one process, which uses one kind of kernel for all tables."""
    from torchrec.distributed.planner import (
        EmbeddingShardingPlanner,
        ParameterConstraints,
        Topology,
    )

    chosen = ParameterConstraints(
        ["table_wise" if is_fused else "data_parallel"],
        compute_kernels=["fused" if is_fused else "dense"],
    )
    return EmbeddingShardingPlanner(
        topology=Topology(1, "cpu", local_world_size=1), constraints=dict.fromkeys(names, chosen)
    )


class _TorchrecModel(nn.Module):
    """One of our networks with the vectors of an `EmbeddingBagCollection`."""

    def __init__(self, bags: nn.Module, network: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.bags, self.network, self._names = bags, network, names

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        from torchrec import KeyedJaggedTensor

        lengths = torch.ones(ids.numel(), dtype=torch.int32)
        found = self.bags(KeyedJaggedTensor(self._names, ids.t().reshape(-1), lengths=lengths))
        vectors = found.values().view(len(ids), len(self._names), -1)
        logits: Tensor = self.network(dense, vectors)
        return logits


class DeepCtr:
    """Peer that trains with DeepCTR-Torch. The module's docstring describes it.

    DeepCTR-Torch starts from its own initial weights: normal, with standard deviation 0.0001.
    """

    name = "DeepCTR-Torch"

    def __init__(
        self,
        config: DcnConfig | DeepFmConfig,
        slot_sizes: list[int],
        batch_size: int,
        *,
        features: Features = CRITEO,
    ) -> None:
        """Create the model with its own initial weights."""
        self._features = features
        # On import, a thread checks PyPI for newer versions. The thread must not run during the
        # measurement.
        others = threading.enumerate()
        with contextlib.redirect_stdout(io.StringIO()):
            from deepctr_torch.inputs import DenseFeat, SparseFeat, VarLenSparseFeat
            from deepctr_torch.models import DCN, DeepFM

            for thread in set(threading.enumerate()) - set(others):
                thread.join()
        sizes = dict(zip(features.slots, slot_sizes))
        # In our DeepFM, the first number of a vector is the first-order weight, which DeepCTR-Torch
        # stores separately.
        width = config.embedding_dim - isinstance(config, DeepFmConfig)
        columns = [SparseFeat(name, sizes[name], width) for name in features.categorical]
        for name in features.lists:
            options = features.list_options_of(name)
            table = options.table or name
            elements = SparseFeat(name, sizes[table], width, embedding_name=table)
            columns.append(VarLenSparseFeat(elements, options.max, options.pool))
        columns += [DenseFeat(name) for name in features.dense_inputs]
        tower = {"dnn_hidden_units": config.tower, "dnn_dropout": config.dropout}
        without = {"l2_reg_linear": 0, "l2_reg_embedding": 0, "l2_reg_dnn": 0}
        if isinstance(config, DcnConfig):
            kind = "matrix" if config.projection_dim else "vector"
            cross = {
                "cross_num": config.num_cross_layers,
                "cross_parameterization": kind,
                "l2_reg_cross": 0,
            }
            self._model = DCN([], columns, **cross, **tower, **without)
        else:
            self._model = DeepFM(columns, columns, **tower, **without)
        self._model.compile("adam", "binary_crossentropy", metrics=[])
        self._batch_size = batch_size

    def prepare(self, rows: Rows) -> tuple[dict[str, Any], Any]:
        """Prepare rows. See `Trainer.prepare`."""
        features = self._features
        columns = {
            name: np.ascontiguousarray(rows.ids[:, i])
            for i, name in enumerate(features.categorical)
        }
        for name, positions in zip(features.lists, features.positions.lists):
            columns[name] = np.ascontiguousarray(rows.ids[:, positions.start : positions.stop])
        columns |= {
            name: np.ascontiguousarray(rows.dense[:, i])
            for i, name in enumerate(features.dense_inputs)
        }
        return columns, rows.labels

    def train(self, prepared: tuple[dict[str, Any], Any]) -> None:
        """Train for one pass. See `Trainer.train`."""
        columns, labels = prepared
        with contextlib.redirect_stdout(io.StringIO()):
            self._model.fit(columns, labels, batch_size=self._batch_size, epochs=1, verbose=0)

    def score(self, rows: Rows) -> NDArray[np.float32]:
        """Score rows. See `Trainer.score`."""
        scores: NDArray[np.float32] = self._model.predict(self.prepare(rows)[0], _SCORED_ROWS)[:, 0]
        return scores
