"""The Deep & Cross Network as HugeCTR's layers, given to its Python API.

x0 feeds two layers. HugeCTR would insert a Slice by itself, as in NVIDIA's DCN sample; here it is in the list, so that
all tensors have names of ours. Nothing here trains or reads rows. `hugectr` is passed in, so that this module loads
without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from components.models.configs import DcnConfig
from components.training.config import TrainingSettings

MODEL_NAME = "dcn"
LABEL, DENSE, CATEGORIES, EMBEDDINGS = "label", "dense", "categories", "embeddings"


class Layer(NamedTuple):
    """One dense layer."""

    type: str
    """Member of `hugectr.Layer_t`."""
    bottoms: list[str]
    """Tensors read."""
    tops: list[str]
    """Tensors written."""
    arguments: dict[str, Any] = {}
    """Further arguments of `hugectr.DenseLayer`, by name."""


def dcn_layers(config: DcnConfig) -> list[Layer]:
    """The dense layers from the embeddings to the loss, in the order of their weights in the dense file.

    Without dropout there are no Dropout layers: HugeCTR's take rates above 0 only.

    >>> config = DcnConfig(num_dense=13, num_categorical=26, embedding_dim=1, num_cross_layers=2, tower=(8,))
    >>> for layer in dcn_layers(config):
    ...     print(*layer)
    Reshape ['embeddings'] ['embeddings_flat'] {'leading_dim': 26}
    Concat ['embeddings_flat', 'dense'] ['x0'] {}
    Slice ['x0'] ['x0_cross', 'x0_tower'] {'ranges': [(0, 39), (0, 39)]}
    MultiCross ['x0_cross'] ['cross'] {'num_layers': 2, 'projection_dim': 0}
    InnerProduct ['x0_tower'] ['tower_0_linear'] {'num_output': 8}
    ReLU ['tower_0_linear'] ['tower_0_relu'] {}
    Concat ['tower_0_relu', 'cross'] ['final_input'] {}
    InnerProduct ['final_input'] ['logit'] {'num_output': 1}
    BinaryCrossEntropyLoss ['logit', 'label'] ['loss'] {}
    """
    whole = (0, config.input_width)
    flat = "embeddings_flat" if config.num_dense else "x0"
    cross = {"num_layers": config.num_cross_layers, "projection_dim": config.projection_dim}
    layers = [
        Layer("Reshape", [EMBEDDINGS], [flat], {"leading_dim": config.num_categorical * config.embedding_dim}),
        *([Layer("Concat", [flat, DENSE], ["x0"])] if config.num_dense else []),
        Layer("Slice", ["x0"], ["x0_cross", "x0_tower"], {"ranges": [whole, whole]}),
        Layer("MultiCross", ["x0_cross"], ["cross"], cross),
    ]
    hidden = "x0_tower"
    for i, width in enumerate(config.tower):
        layers += [
            Layer("InnerProduct", [hidden], [f"tower_{i}_linear"], {"num_output": width}),
            Layer("ReLU", [f"tower_{i}_linear"], [f"tower_{i}_relu"]),
        ]
        hidden = f"tower_{i}_relu"
        if config.dropout:
            layers += [Layer("Dropout", [hidden], [f"tower_{i}_dropout"], {"dropout_rate": config.dropout})]
            hidden = f"tower_{i}_dropout"
    return [
        *layers,
        Layer("Concat", [hidden, "cross"], ["final_input"]),
        Layer("InnerProduct", ["final_input"], ["logit"], {"num_output": 1}),
        Layer("BinaryCrossEntropyLoss", ["logit", LABEL], ["loss"]),
    ]


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """All that decides a compiled model but its weights."""

    config: DcnConfig
    slot_sizes: list[int]
    settings: TrainingSettings
    num_gpus: int
    """GPUs that share a batch."""
    workspace_mb: int
    """Of the embedding table and its optimizer, per GPU."""
    batch_size: int
    file_list: str
    """`_file_list.txt` of staged rows, for training and for evaluation, until another is set as source."""


def compiled_model(hugectr: Any, blueprint: Blueprint) -> Any:
    """A compiled `hugectr.Model` with HugeCTR's initial weights."""
    config = blueprint.config
    model = hugectr.Model(
        _solver(hugectr, blueprint), _reader(hugectr, blueprint), _optimizer(hugectr, blueprint.settings)
    )
    # One fixed-length id per slot.
    sparse = hugectr.DataReaderSparseParam(
        top_name=CATEGORIES, nnz_per_slot=1, is_fixed_length=True, slot_num=config.num_categorical
    )
    model.add(
        hugectr.Input(
            label_dim=1,
            label_name=LABEL,
            dense_dim=config.num_dense,
            dense_name=DENSE,
            data_reader_sparse_param_array=[sparse],
        )
    )
    model.add(
        hugectr.SparseEmbedding(
            embedding_type=hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash,
            workspace_size_per_gpu_in_mb=blueprint.workspace_mb,
            embedding_vec_size=config.embedding_dim,
            combiner="sum",
            sparse_embedding_name=EMBEDDINGS,
            bottom_name=CATEGORIES,
            optimizer=_optimizer(hugectr, blueprint.settings),
        )
    )
    for layer in dcn_layers(config):
        model.add(
            hugectr.DenseLayer(
                layer_type=getattr(hugectr.Layer_t, layer.type),
                bottom_names=layer.bottoms,
                top_names=layer.tops,
                **layer.arguments,
            )
        )
    model.compile()
    return model


def _solver(hugectr: Any, blueprint: Blueprint) -> Any:
    settings = blueprint.settings
    # Every step is given its learning rate, see `settings.rate_correction`.
    return hugectr.CreateSolver(
        model_name=MODEL_NAME,
        seed=settings.seed,
        lr=settings.learning_rate,
        batchsize=blueprint.batch_size,
        batchsize_eval=blueprint.batch_size,  # it never evaluates
        vvgpu=[list(range(blueprint.num_gpus))],
        repeat_dataset=False,
        enable_tf32_compute=settings.precision == "tf32",
        i64_input_key=True,
        # Staged files hold whole batches only. One that does not would be counted as missing, instead of being learned
        # with what the batch before left in the rest of the buffers.
        drop_incomplete_batch=True,
    )


def _reader(hugectr: Any, blueprint: Blueprint) -> Any:
    return hugectr.DataReaderParams(
        data_reader_type=hugectr.DataReaderType_t.Parquet,
        source=blueprint.file_list,
        eval_source=blueprint.file_list,
        check_type=hugectr.Check_t.Non,
        num_workers=blueprint.num_gpus,
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
