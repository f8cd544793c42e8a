"""The network as HugeCTR's graph: the same `DcnConfig` and layer list as everyone's, given to the classic Python API.

Nothing here trains or reads rows. `hugectr` is passed in, so that this module loads without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from components.contracts.criteo import NUM_CATEGORICAL, NUM_DENSE
from components.contracts.dcn import DcnConfig
from components.contracts.dcn_layers import CATEGORIES, DENSE, EMBEDDINGS, LABEL, dcn_layers
from components.training.config import TrainingSettings
from components.training.hugectr.settings import SolverSettings


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """All that decides a compiled model but its weights."""

    config: DcnConfig
    slot_sizes: list[int]
    settings: TrainingSettings
    solver: SolverSettings
    workspace_mb: int
    batch_size: int
    file_list: str
    """`_file_list.txt` of staged rows, for training and for evaluation, until another is set as source."""


def compiled_model(hugectr: Any, blueprint: Blueprint) -> Any:
    """A compiled `hugectr.Model` with HugeCTR's initial weights."""
    model = hugectr.Model(
        _solver(hugectr, blueprint), _reader(hugectr, blueprint), _optimizer(hugectr, blueprint.settings)
    )
    # One fixed-length id per slot.
    sparse = hugectr.DataReaderSparseParam(
        top_name=CATEGORIES, nnz_per_slot=1, is_fixed_length=True, slot_num=NUM_CATEGORICAL
    )
    model.add(
        hugectr.Input(
            label_dim=1,
            label_name=LABEL,
            dense_dim=NUM_DENSE,
            dense_name=DENSE,
            data_reader_sparse_param_array=[sparse],
        )
    )
    model.add(
        hugectr.SparseEmbedding(
            embedding_type=hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash,
            workspace_size_per_gpu_in_mb=blueprint.workspace_mb,
            embedding_vec_size=blueprint.config.embedding_dim,
            combiner="sum",
            sparse_embedding_name=EMBEDDINGS,
            bottom_name=CATEGORIES,
            optimizer=_optimizer(hugectr, blueprint.settings),
        )
    )
    for layer in dcn_layers(blueprint.config):
        model.add(
            hugectr.DenseLayer(
                layer_type=getattr(hugectr.Layer_t, layer.type),
                bottom_names=list(layer.bottoms),
                top_names=list(layer.tops),
                **layer.arguments,
            )
        )
    model.compile()
    return model


def _solver(hugectr: Any, blueprint: Blueprint) -> Any:
    solver, settings = blueprint.solver, blueprint.settings
    same = (
        "use_mixed_precision", "use_cuda_graph", "use_algorithm_search", "train_intra_iteration_overlap",
        "train_inter_iteration_overlap", "eval_intra_iteration_overlap", "eval_inter_iteration_overlap",
        "grouped_all_reduce", "batchsize_eval", "max_eval_batches",
    )  # fmt: skip
    # The schedule's own arguments stay away: every step is given its rate, see `schedule`.
    return hugectr.CreateSolver(
        model_name="dcn",
        seed=settings.seed,
        lr_policy=getattr(hugectr.LrPolicy_t, solver.lr_policy),
        lr=settings.learning_rate,
        batchsize=blueprint.batch_size,
        vvgpu=[list(node) for node in solver.vvgpu],
        repeat_dataset=False,
        enable_tf32_compute=settings.precision == "tf32",
        scaler=solver.scaler if solver.use_mixed_precision else 1.0,
        metrics_spec={hugectr.MetricsType.AUC: 1.0},
        i64_input_key=True,
        all_reduce_algo=getattr(hugectr.AllReduceAlgo, solver.all_reduce_algo),
        # Staged files hold whole batches only. One that does not would be counted as missing, instead of being learnt
        # with what the batch before left in the rest of the buffers.
        drop_incomplete_batch=True,
        **{name: getattr(solver, name) for name in same},
    )


def _reader(hugectr: Any, blueprint: Blueprint) -> Any:
    return hugectr.DataReaderParams(
        data_reader_type=hugectr.DataReaderType_t.Parquet,
        source=blueprint.file_list,
        eval_source=blueprint.file_list,
        check_type=hugectr.Check_t.Non,
        num_workers=blueprint.solver.num_workers,
        slot_size_array=list(blueprint.slot_sizes),
    )


def _optimizer(hugectr: Any, settings: TrainingSettings) -> Any:
    """Adam over the rows of the batch only; HugeCTR's default would move every row of the table in every step."""
    return hugectr.CreateOptimizer(
        optimizer_type=hugectr.Optimizer_t.Adam,
        update_type=hugectr.Update_t.Local,
        beta1=settings.beta1,
        beta2=settings.beta2,
        epsilon=settings.epsilon,
    )
