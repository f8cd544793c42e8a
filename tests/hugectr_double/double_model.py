"""Test double of `hugectr.Model`: the order of calls, the training step, and the files.

File errors are logged and ignored. The text of an error in `train` is only in the log.

Adam's step count belongs to the model and starts at 0, whatever is loaded. The test double reads
files of dense weights into buffers without a check of their size.
"""

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import double_api
import double_fate
import numpy as np
import torch
from double_network import USED, Network
from double_reader import Reader
from double_table import Table

logger = logging.getLogger("hugectr")
ERROR = double_api.ENUMS["Error_t"]
READER_CLASS: dict[str, type] = {}
"""Class of the reader. The module `hugectr` sets the class."""


class Model:
    """One model on the CPU, which simulates the GPUs in `vvgpu`."""

    def __init__(self, solver: Any, reader_params: Any, opt_params: Any) -> None:
        self._solver, self._reader_params, self._optimizer = solver, reader_params, opt_params
        self._num_gpus = sum(len(node) for node in solver.vvgpu)
        if not reader_params.source or not reader_params.eval_source:
            raise RuntimeError("The data source for training and evaluation should be specified")
        if solver.batchsize % self._num_gpus or solver.batchsize_eval % self._num_gpus:
            raise RuntimeError("0 != batch_size%total_gpu_count")
        self._input = self._network = None
        self._keys: dict[str, tuple[slice, list[int]]] = {}
        self._embeddings: list[Any] = []
        self._layers: list[Any] = []
        self._tensors: dict[str, tuple[int, ...]] = {}
        self._uses: dict[str, int] = {}
        self._lr, self._steps, self._loss = solver.lr, 0, 0.0

    def add(self, **what: Any) -> None:
        (value,) = what.values()
        if self._network is not None:
            return  # HugeCTR accepts the layer, but the compiled model does not contain it.
        if self._input is None and value._type != "Input":
            raise RuntimeError("IllegalCall: the input comes first")
        {
            "Input": self._add_input,
            "SparseEmbedding": self._add_embedding,
            "DenseLayer": self._add_layer,
        }[value._type](value)

    def _add_input(self, value: Any) -> None:
        if self._reader_params.data_reader_type.name in ("Norm", "Raw"):
            raise RuntimeError(
                f"Deprecated: {self._reader_params.data_reader_type.name} is deprecated"
            )
        if self._reader_params.data_reader_type.name != "Parquet":
            raise NotImplementedError("the double reads only Parquet")
        if self._solver.repeat_dataset:
            raise NotImplementedError("the double supports only epoch mode (repeat_dataset=False)")
        self._input = value
        self._tensors |= {
            value.label_name: (value.label_dim,),
            value.dense_name: (value.dense_dim,),
        }
        most_keys: list[int] = []
        for sparse in value.data_reader_sparse_param_array:
            if isinstance(most := sparse.nnz_per_slot, int):
                most = [most] * sparse.slot_num
            if len(most) != sparse.slot_num or min(most) < 1:
                raise RuntimeError(f"nnz_per_slot is {most} for {sparse.slot_num} slots")
            first = sum(most_keys)
            self._keys[sparse.top_name] = slice(first, first + sum(most)), most
            self._tensors[sparse.top_name] = (sparse.slot_num,)
            most_keys += most
        source = self._reader_params.source
        self._train_reader, self._eval_reader = (
            Reader(
                source=each,
                most_keys=most_keys,
                label_dim=value.label_dim,
                dense_dim=value.dense_dim,
                batch_size=self._solver.batchsize,
                slot_sizes=self._reader_params.slot_size_array,
                num_workers=self._reader_params.num_workers,
                num_gpus=self._num_gpus,
                i64=self._solver.i64_input_key,
            )
            for each in (
                source if isinstance(source, str) else source[0],
                self._reader_params.eval_source,
            )
        )

    def __del__(self) -> None:
        """End the readers.

        A reader's thread that waits for its first source may miss the request to end. In HugeCTR
        24.06, up to 45 % of the waiting threads miss the request.
        """
        readers = (getattr(self, name, None) for name in ("_train_reader", "_eval_reader"))
        if not all(reader.is_started for reader in readers if reader is not None):
            with suppress(double_fate.Died):
                double_fate.hang("a reader that never started does not end")

    def _add_embedding(self, value: Any) -> None:
        (num_slots,) = self._use_tensors([value.bottom_name])[0]
        if value.embedding_type.name != "DistributedSlotSparseEmbeddingHash":
            raise NotImplementedError("the double supports only DistributedSlot embeddings")
        optimizer = value.optimizer or self._optimizer
        if (optimizer.optimizer_type.name, optimizer.update_type.name) != ("Adam", "Local"):
            raise NotImplementedError(
                "for embeddings the double supports only Adam with Update_t.Local"
            )
        self._sparse_optimizer = optimizer
        self._embeddings.append(value)
        self._tensors[value.sparse_embedding_name] = (num_slots, value.embedding_vec_size)

    def _add_layer(self, value: Any) -> None:
        kind = value.layer_type.name
        if kind not in USED:
            raise NotImplementedError(f"the double does not support {kind}")
        self._use_tensors(value.bottom_names)
        self._layers.append(value)
        # Shapes are known after `compile`.
        self._tensors |= dict.fromkeys(value.top_names, ())

    def _use_tensors(self, names: list[str]) -> list[tuple[int, ...]]:
        for name in names:
            if name not in self._tensors:
                raise RuntimeError(f"WrongInput: no tensor named {name}")
            self._uses[name] = self._uses.get(name, 0) + 1
            if self._uses[name] > 1:
                raise NotImplementedError(
                    f"tensor {name} is read by two layers, and the double inserts no Slice layer"
                )
        return [self._tensors[name] for name in names]

    def compile(self, **labels: Any) -> None:
        if self._network is not None:
            raise RuntimeError("IllegalCall: Model.compile() was called before")
        if not self._embeddings or len(self._layers) < 1:
            raise RuntimeError(
                "IllegalCall: The model should include input and at least two layers"
            )
        self._network = Network(self._layers, self._tensors, self._solver.seed)
        count = sum(p.numel() for p in self._network.flat_parameters)
        # Adam's v starts at the next multiple of 256 bytes.
        self._gap = -4 * count % 256
        self._m, self._v = torch.zeros(count), torch.zeros(count)
        self._tables = [
            Table(
                dim=each.embedding_vec_size,
                workspace_mb=each.workspace_size_per_gpu_in_mb,
                num_gpus=self._num_gpus,
                seed=self._solver.seed,
            )
            for each in self._embeddings
        ]

    def _compiled(self, what: str) -> None:
        if self._network is None:
            raise RuntimeError(f"IllegalCall: Cannot {what} before calling Model.compile()")

    def get_data_reader_train(self) -> Any:
        return double_api.wrapped(READER_CLASS["64"], self._train_reader)

    def get_data_reader_eval(self) -> Any:
        return double_api.wrapped(READER_CLASS["64"], self._eval_reader)

    def set_learning_rate(self, lr: float) -> None:
        self._compiled("set the learning rate")
        self._lr = lr

    def train(self) -> bool:
        try:
            return self._train()
        except RuntimeError as error:
            logger.error("%s", error)
            raise RuntimeError("std::exception") from None

    def _train(self) -> bool:
        self._compiled("train")
        batch = self._train_reader.next()
        if batch is None:
            return False
        if len(batch[0]) < self._solver.batchsize:
            raise NotImplementedError(
                f"the double trains whole batches only, not one of {len(batch[0])} rows"
            )
        labels, dense, keys = batch
        keys = [keys[:, self._keys[each.bottom_name][0]] for each in self._embeddings]
        vectors = [
            table.lookup(own, insert=True).requires_grad_()
            for table, own in zip(self._tables, keys)
        ]
        parameters = [p.requires_grad_() for p in self._network.flat_parameters]
        pooled = [self._pooled(*each) for each in zip(self._embeddings, vectors, keys)]
        loss, _ = self._network.run(self._inputs(labels, dense, pooled), train=True)
        gradients = torch.autograd.grad(loss, [*vectors, *parameters])
        to_vectors, to_dense = gradients[: len(vectors)], gradients[len(vectors) :]
        with torch.no_grad():
            self._step(keys, to_vectors, torch.cat([g.reshape(-1) for g in to_dense]))
        self._loss = float(loss.detach())
        return True

    def _pooled(self, embedding: Any, vectors: torch.Tensor, keys: np.ndarray) -> torch.Tensor:
        """Return a pooled vector for each slot. The vector is zero if the slot has no keys.

        A mean includes only keys that exist.
        """
        slots, most_keys = [], self._keys[embedding.bottom_name][1]
        is_there = torch.from_numpy(keys >= 0)
        for of_slot, there in zip(
            vectors.split(most_keys, dim=1), is_there.split(most_keys, dim=1)
        ):
            summed = torch.where(there[:, :, None], of_slot, 0).sum(1)
            slots.append(
                summed / there.sum(1, keepdim=True).clamp(min=1)
                if embedding.combiner == "mean"
                else summed
            )
        return torch.stack(slots, dim=1)

    def _step(
        self, keys: list[np.ndarray], to_vectors: tuple[torch.Tensor, ...], to_dense: torch.Tensor
    ) -> None:
        self._steps += 1
        for optimizer, is_dense in ((self._optimizer, True), (self._sparse_optimizer, False)):
            beta1, beta2, epsilon = optimizer.beta1, optimizer.beta2, optimizer.epsilon
            rate = self._lr * (1 - beta2**self._steps) ** 0.5 / (1 - beta1**self._steps)
            if not is_dense:
                for table, own, gradients in zip(self._tables, keys, to_vectors):
                    table.update(own, gradients, rate, beta1, beta2, epsilon)
                continue
            self._m = beta1 * self._m + (1 - beta1) * to_dense
            self._v = beta2 * self._v + (1 - beta2) * to_dense**2
            change = rate * self._m / (self._v.sqrt() + epsilon)
            parameters = self._network.flat_parameters
            for parameter, part in zip(parameters, change.split([p.numel() for p in parameters])):
                parameter -= part.view_as(parameter)

    def _inputs(
        self, labels: np.ndarray, dense: np.ndarray, pooled: list[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        return {
            self._input.label_name: torch.from_numpy(np.ascontiguousarray(labels)),
            self._input.dense_name: torch.from_numpy(np.ascontiguousarray(dense)),
            **{
                each.sparse_embedding_name: vectors
                for each, vectors in zip(self._embeddings, pooled)
            },
        }

    def get_current_loss(self) -> float:
        return self._loss  # 0 before the first batch, and after an error of HugeCTR

    def save_params_to_files(self, prefix: str, iter: int) -> Any:
        self._compiled("save")
        if os.environ.get("OMPI_COMM_WORLD_RANK", "0") != "0":
            # In HugeCTR, all nodes write the files together. In the test double, only the first
            # node writes them.
            return ERROR.Success
        try:
            for number, table in enumerate(self._tables):
                table.save(f"{prefix}{number}_sparse_{iter}.model")
                table.save_states(f"{prefix}{number}_opt_sparse_{iter}.model")
            flat = torch.cat([p.detach().reshape(-1) for p in self._network.flat_parameters])
            Path(f"{prefix}_dense_{iter}.model").write_bytes(flat.numpy().tobytes())
            gap = b"\xab" * self._gap
            states = self._m.numpy().tobytes() + gap + self._v.numpy().tobytes()
            Path(f"{prefix}_opt_dense_{iter}.model").write_bytes(states)
        except OSError as error:
            logger.error("swallowed while saving: %s", error)
            return ERROR.FileCannotOpen
        return ERROR.Success

    def load_dense_weights(self, dense_model_file: str) -> None:
        self._compiled("load the dense weights")
        values = self._buffer(
            dense_model_file, sum(p.numel() for p in self._network.flat_parameters)
        )
        with torch.no_grad():
            for parameter in self._network.flat_parameters:
                part, values = values[: parameter.numel()], values[parameter.numel() :]
                parameter.view(-1)[: len(part)] = part

    def load_dense_optimizer_states(self, dense_opt_states_file: str) -> None:
        self._compiled("load the dense optimizer states")
        count, start = len(self._m), len(self._m) + self._gap // 4
        values = self._buffer(dense_opt_states_file, start + count)
        if not len(values):
            return
        # HugeCTR copies its whole buffer, even if the file is shorter than the buffer.
        values = torch.cat([values, torch.full((start + count - len(values),), 1e9)])
        self._m, self._v = values[:count].clone(), values[start:].clone()

    def _buffer(self, path: str, capacity: int) -> torch.Tensor:
        try:
            values = np.fromfile(path, dtype="<f4")
        except OSError as error:
            logger.error("swallowed while loading: %s", error)
            return torch.zeros(0)
        if len(values) > capacity:
            raise AssertionError(
                f"{path} has {len(values)} floats: HugeCTR writes them past a buffer of {capacity}"
            )
        return torch.from_numpy(values)

    def load_sparse_weights(self, **files: Any) -> None:
        self._load_sparse("load the sparse weights", files, Table.load)

    def load_sparse_optimizer_states(self, **files: Any) -> None:
        self._load_sparse("load the sparse optimizer states", files, Table.load_states)

    def _load_sparse(self, what: str, files: dict[str, Any], load: Any) -> None:
        self._compiled(what)
        (paths,) = files.values()
        if len(paths) != len(self._tables):
            raise RuntimeError("WrongInput: there must be as many files as embeddings")
        # For optimizer states, HugeCTR opens the keys of the dictionary, which are the embeddings'
        # names, instead of its values.
        is_state_map = isinstance(paths, dict) and "states" in what
        if isinstance(paths, dict) and not is_state_map:
            paths = [paths[each.sparse_embedding_name] for each in self._embeddings]
        for table, path in zip(self._tables, paths):
            try:
                load(table, path)
            except OSError as error:
                logger.error("swallowed while loading: %s", error)
