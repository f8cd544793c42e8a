"""The Deep & Cross Network as layers of HugeCTR's Python API.

Each embedding outputs the vectors of its slots. The network's input x0 has all vectors in the order
of the columns. Two layers use x0. HugeCTR would insert a Slice layer for this by itself, as in
NVIDIA's DCN sample. The Slice is listed here explicitly, so that this module names all tensors. The
module `hugectr` is an argument, so that this file can be imported without HugeCTR.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from components.training.hugectr.embeddings import Embedding
from evergreen.config.model import DcnConfig
from evergreen.config.training import TrainingSettings

MODEL_NAME = "dcn"
LABEL, DENSE = "label", "dense"
_ALIGNED_FLOATS = 4
"""Number of floats in 16 bytes, the alignment of cuBLASLt's fastest algorithms."""


class Layer(NamedTuple):
    """One dense layer."""

    type: str
    """Member of `hugectr.Layer_t`."""
    bottoms: list[str]
    """Names of the input tensors."""
    tops: list[str]
    """Names of the output tensors."""
    arguments: dict[str, Any] = {}
    """Additional arguments of `hugectr.DenseLayer` by name."""


def padded(config: DcnConfig) -> DcnConfig:
    """Return HugeCTR's configuration of the network, with additional dense values if necessary.

    HugeCTR stores all weights without gaps, and its matrix products for DCN v2 need weights at
    multiples of 16 bytes. If the width of x0 is a multiple of 4, the weights of every cross layer
    start at a multiple of 16 bytes. The additional dense values are 0. Therefore the weights of
    these values have no effect and no gradient, and the model is the same.

    >>> v2 = DcnConfig(num_dense=13, num_categorical=26, embedding_dim=16, projection_dim=64)
    >>> (v2.input_width, padded(v2).input_width, padded(v2).num_dense)
    (429, 432, 16)
    """
    missing = -config.input_width % _ALIGNED_FLOATS if config.projection_dim else 0
    return replace(config, num_dense=config.num_dense + missing)


def dcn_layers(config: DcnConfig, embeddings: Sequence[Embedding]) -> list[Layer]:
    """Yield the dense layers from the embeddings to the loss, in the order of the dense file.

    Without dropout, there are no Dropout layers, because HugeCTR accepts only rates above 0.

    >>> from evergreen.networks.files import one_id_per_slot
    >>> from components.training.hugectr.embeddings import embeddings_of
    >>> config = DcnConfig(
    ...     num_dense=13, num_categorical=26, embedding_dim=1, num_cross_layers=2, tower=(8,)
    ... )
    >>> for layer in dcn_layers(config, embeddings_of(config, [5] * 26, one_id_per_slot([5] * 26))):
    ...     print(*layer)
    Reshape ['embedding_0'] ['vectors_0'] {'leading_dim': 26}
    Concat ['vectors_0', 'dense'] ['x0'] {}
    Slice ['x0'] ['x0_cross', 'x0_tower'] {'ranges': [(0, 39), (0, 39)]}
    MultiCross ['x0_cross'] ['cross'] {'num_layers': 2, 'projection_dim': 0}
    InnerProduct ['x0_tower'] ['tower_0_linear'] {'num_output': 8}
    ReLU ['tower_0_linear'] ['tower_0_relu'] {}
    Concat ['tower_0_relu', 'cross'] ['final_input'] {}
    InnerProduct ['final_input'] ['logit'] {'num_output': 1}
    BinaryCrossEntropyLoss ['logit', 'label'] ['loss'] {}
    """
    whole = (0, config.input_width)
    cross = {"num_layers": config.num_cross_layers, "projection_dim": config.projection_dim}
    layers = [
        *_input_layers(config, embeddings),
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
            layers += [
                Layer("Dropout", [hidden], [f"tower_{i}_dropout"], {"dropout_rate": config.dropout})
            ]
            hidden = f"tower_{i}_dropout"
    return [
        *layers,
        Layer("Concat", [hidden, "cross"], ["final_input"]),
        Layer("InnerProduct", ["final_input"], ["logit"], {"num_output": 1}),
        Layer("BinaryCrossEntropyLoss", ["logit", LABEL], ["loss"]),
    ]


def _input_layers(config: DcnConfig, embeddings: Sequence[Embedding]) -> Iterator[Layer]:
    """Yield the layers that build x0 from the embeddings.

    x0 has all vectors in their order, then the dense values. An embedding is sliced only if its
    vectors are not adjacent in x0.
    """
    parts: dict[int, str] = {}  # names of tensors by the index of their first vector
    for each in embeddings:
        vectors = [slot.vector for slot in each.slots]
        begins = [i for i, vector in enumerate(vectors) if i == 0 or vectors[i - 1] != vector - 1]
        is_whole = len(embeddings) == 1 and not config.num_dense
        flat = "x0" if is_whole else f"vectors_{each.number}"
        yield Layer(
            "Reshape",
            [f"embedding_{each.number}"],
            [flat],
            {"leading_dim": len(vectors) * each.width},
        )
        names = [flat] if len(begins) == 1 else [f"{flat}_{i}" for i in range(len(begins))]
        if len(begins) > 1:
            ranges = [
                (i * each.width, end * each.width)
                for i, end in zip(begins, [*begins[1:], len(vectors)])
            ]
            yield Layer("Slice", [flat], names, {"ranges": ranges})
        parts |= {vectors[i]: name for i, name in zip(begins, names)}
    bottoms = [name for _, name in sorted(parts.items())] + [DENSE] * bool(config.num_dense)
    if len(bottoms) > 1:
        yield Layer("Concat", bottoms, ["x0"])


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """Everything that determines a compiled model except its weights."""

    config: DcnConfig
    """Configuration of HugeCTR's network, see `padded`."""
    embeddings: tuple[Embedding, ...]
    settings: TrainingSettings
    num_gpus: int
    """Number of GPUs that share a batch, over all nodes."""
    num_nodes: int = 1
    batch_size: int
    file_list: str
    """Path of the `_file_list.txt` of staged rows. The readers of training and evaluation start
    with these rows."""

    @property
    def gpus_of_node(self) -> int:
        """Number of GPUs of each node."""
        return self.num_gpus // self.num_nodes


def compiled_model(hugectr: Any, blueprint: Blueprint) -> Any:
    """Return a compiled `hugectr.Model` with HugeCTR's initial weights.

    The training reader and the evaluation reader have started. A reader of HugeCTR 24.06 that never
    started can block forever when the model ends.
    """
    config = blueprint.config
    model = hugectr.Model(
        _solver(hugectr, blueprint),
        _reader(hugectr, blueprint),
        _optimizer(hugectr, blueprint.settings),
    )
    # A list slot has at most one key for each of its columns. Every other slot has exactly one key.
    keys = [
        hugectr.DataReaderSparseParam(
            top_name=f"keys_{each.number}",
            nnz_per_slot=[len(slot.columns) for slot in each.slots],
            is_fixed_length=not any(slot.is_list for slot in each.slots),
            slot_num=len(each.slots),
        )
        for each in blueprint.embeddings
    ]
    model.add(
        hugectr.Input(
            label_dim=1,
            label_name=LABEL,
            dense_dim=config.num_dense,
            dense_name=DENSE,
            data_reader_sparse_param_array=keys,
        )
    )
    for each in blueprint.embeddings:
        model.add(
            hugectr.SparseEmbedding(
                embedding_type=hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash,
                workspace_size_per_gpu_in_mb=each.workspace_mb(blueprint.num_gpus),
                embedding_vec_size=each.width,
                combiner=each.combiner,
                sparse_embedding_name=f"embedding_{each.number}",
                bottom_name=f"keys_{each.number}",
                optimizer=_optimizer(hugectr, blueprint.settings),
            )
        )
    for layer in dcn_layers(config, blueprint.embeddings):
        model.add(
            hugectr.DenseLayer(
                layer_type=getattr(hugectr.Layer_t, layer.type),
                bottom_names=layer.bottoms,
                top_names=layer.tops,
                **layer.arguments,
            )
        )
    model.compile()
    for reader in (model.get_data_reader_train(), model.get_data_reader_eval()):
        reader.set_source(blueprint.file_list)
    return model


def _solver(hugectr: Any, blueprint: Blueprint) -> Any:
    settings = blueprint.settings
    # The learning rate is set before every step, see `engine._rate_correction`.
    return hugectr.CreateSolver(
        model_name=MODEL_NAME,
        seed=settings.seed,
        lr=settings.learning_rate,
        batchsize=blueprint.batch_size,
        batchsize_eval=blueprint.batch_size,  # unused here, but HugeCTR requires it
        vvgpu=[list(range(blueprint.gpus_of_node))] * blueprint.num_nodes,
        repeat_dataset=False,
        enable_tf32_compute=settings.precision == "tf32",
        i64_input_key=True,
        # Staged files have only complete batches. With this flag, HugeCTR drops an incomplete
        # batch, and the missing rows are detected. Without the flag, HugeCTR would train on
        # leftovers of the previous batch in its buffers.
        drop_incomplete_batch=True,
        # HugeCTR's algorithm search takes 7 to 28 seconds for each model. The search has no effect
        # on NVIDIA GPUs of the Ampere generation or later.
        use_algorithm_search=False,
    )


def _reader(hugectr: Any, blueprint: Blueprint) -> Any:
    return hugectr.DataReaderParams(
        data_reader_type=hugectr.DataReaderType_t.Parquet,
        source=blueprint.file_list,
        eval_source=blueprint.file_list,
        check_type=hugectr.Check_t.Non,
        num_workers=blueprint.gpus_of_node,
        slot_size_array=[],  # staged keys are already the keys of the embeddings
    )


def _optimizer(hugectr: Any, settings: TrainingSettings) -> Any:
    """Return an Adam optimizer that updates only the rows of the batch.

    HugeCTR's default would update every row of the table in every step.
    """
    return hugectr.CreateOptimizer(
        optimizer_type=hugectr.Optimizer_t.Adam,
        update_type=hugectr.Update_t.Local,
        beta1=settings.beta1,
        beta2=settings.beta2,
        epsilon=settings.epsilon,
    )
