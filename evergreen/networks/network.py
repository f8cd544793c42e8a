"""Common interface of all networks, and their ONNX export.

A network takes dense values and category vectors, and returns one logit for each row. Each network
is a subclass of `Network`, in the module that its configuration names. All parameters of a network
are dense. The embedding tables belong to the callers that look up the vectors: training, `scoring`
and the served graph.

Shape suffixes here and in the networks: B rows, D dense values, F vectors, E embedding width, X all
values of a row (F * E + D).
"""

import importlib
import io
import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from evergreen.config.model import NetworkConfig
from evergreen.runtime.errors import ContractError

_OPSET = 17
"""Version of the ONNX operators. The exported network and the served graph that contains it both
use this version."""
_DENSE_INPUT, _EMBEDDINGS_INPUT, _LOGIT_OUTPUT = "dense", "embeddings", "logit"
"""Names of the tensors of the exported graph. The shapes of the three tensors are [rows, D], [rows,
F, E] and [rows]. See `Network.forward`."""


class Network(nn.Module):
    """Base class of all networks. A new network draws its weights from torch's random generator.

    The parameter `bias` is added to every logit and is used nowhere else. In a new model, `bias` is
    the log-odds of the click rate. The correction for negative downsampling is added to the
    parameter `bias`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, dense_BD: Tensor, embeddings_BFE: Tensor) -> Tensor:
        """Return the logits, [B].

        Args:
            dense_BD: Normalised dense values, float32.
            embeddings_BFE: Vectors, float32. If vectors have different widths, they are
                concatenated to one vector, so F is 1. Only a network with `takes_widths` accepts
                vectors of different widths.
        """
        raise NotImplementedError


def mlp(width: int, hidden: Sequence[int], *, dropout: float = 0.0) -> nn.Sequential:
    """Return linear layers, each followed by ReLU and dropout.

    Args:
        width: Width of the input.
        hidden: Output width of each layer.
        dropout: Share of activations that training sets to zero.
    """
    widths = zip([width, *hidden], hidden)
    return nn.Sequential(
        *(
            layer
            for fan_in, fan_out in widths
            for layer in (linear(fan_in, fan_out), nn.ReLU(), nn.Dropout(dropout))
        )
    )


def linear(fan_in: int, fan_out: int, *, bias: bool = True) -> nn.Linear:
    """Return a linear layer with HugeCTR's initial weights.

    Weights are N(0, sqrt(2 / (in + out)) / 0.8796), and biases are N(0, sqrt(1 / out)). HugeCTR
    divides by the standard deviation of a truncated normal distribution, but does not truncate.
    """
    layer = nn.Linear(fan_in, fan_out, bias=bias)
    nn.init.normal_(layer.weight, std=(2 / (fan_in + fan_out)) ** 0.5 / 0.87962566)
    if bias:
        nn.init.normal_(layer.bias, std=fan_out**-0.5)
    return layer


def build_network(config: NetworkConfig, seed: int = 0) -> Network:
    """Return a network of this configuration on the CPU, with fresh weights for this `seed`."""
    module = importlib.import_module(f"evergreen.networks.{config.network}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network: Network = module.build(config)
    return network


@torch.no_grad()
def load_dense(network: Network, dense: Mapping[str, NDArray[np.float32]]) -> None:
    """Copy dense parameters, by their `state_dict` names, into `network`.

    Raises:
        ContractError: a parameter is missing, unknown or of another shape.
    """
    parameters = dict(network.named_parameters())
    if wrong := parameters.keys() ^ dense.keys():
        raise ContractError(f"dense parameters have unknown or missing names {sorted(wrong)}")
    for name, parameter in parameters.items():
        if dense[name].shape != tuple(parameter.shape):
            raise ContractError(
                f"dense parameter {name} has shape {dense[name].shape}, expected "
                f"{tuple(parameter.shape)}"
            )
        parameter.copy_(torch.tensor(dense[name]))


def export_onnx(network: Network, config: NetworkConfig) -> bytes:
    """Return the network as one ONNX message, for any number of rows.

    Equal weights always produce equal bytes. The function uses torch's TorchScript exporter, which
    takes 0.3 s. The newer exporter takes 5 s and needs two more packages. The message (IR version
    8) can also be read by older ONNX Runtimes, such as those in NVIDIA's Triton images.
    """
    rows = 2
    vectors = (
        (1, sum(config.widths)) if config.widths else (config.num_categorical, config.embedding_dim)
    )
    example = torch.zeros(rows, config.num_dense), torch.zeros(rows, *vectors)
    content = io.BytesIO()
    was_training = network.training
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporter warns about its own deprecation
            torch.onnx.export(
                network.eval().cpu(),
                example,
                content,
                input_names=[_DENSE_INPUT, _EMBEDDINGS_INPUT],
                output_names=[_LOGIT_OUTPUT],
                opset_version=_OPSET,
                dynamic_axes={
                    name: {0: "rows"} for name in (_DENSE_INPUT, _EMBEDDINGS_INPUT, _LOGIT_OUTPUT)
                },
                dynamo=False,
            )
    finally:
        network.train(was_training)
    return content.getvalue()
