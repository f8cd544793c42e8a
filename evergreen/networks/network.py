"""What every network promises: dense values and category vectors in, one logit per row out; and its ONNX export.

A network is a subclass of `Network` in the module that its configuration names. Its parameters are all dense: the
embedding table belongs to whoever looks the vectors up (training, `scoring`, the served graph).

Shape suffixes here and in the networks: B rows, D dense values, F categorical columns, E embedding width, X all values
of a row (F * E + D).
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

OPSET = 17
"""ONNX operators of the export, and of the served graph around it."""
DENSE_INPUT, EMBEDDINGS_INPUT, LOGIT_OUTPUT = "dense", "embeddings", "logit"
"""Tensors of the exported graph: [rows, D], [rows, F, E] and [rows]; see `Network.forward`."""


class Network(nn.Module):
    """Base of all networks; a new one takes fresh weights from torch's random generator.

    `bias` is part of every logit and of nothing else: a fresh model starts it at the log-odds of the click rate, and
    the correction for thinned rows is added to it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, dense_BD: Tensor, embeddings_BFE: Tensor) -> Tensor:
        """Logits [B]; both inputs are float32, the dense values normalised.

        Vectors of different widths, which a network takes whose configuration says so, come as one: F is 1.
        """
        raise NotImplementedError


def mlp(width: int, hidden: Sequence[int], *, dropout: float = 0.0) -> nn.Sequential:
    """Linear layers, each with ReLU and dropout; `hidden` are the widths of their outputs."""
    widths = zip([width, *hidden], hidden)
    return nn.Sequential(
        *(layer for fan_in, fan_out in widths for layer in (linear(fan_in, fan_out), nn.ReLU(), nn.Dropout(dropout)))
    )


def linear(fan_in: int, fan_out: int, *, bias: bool = True) -> nn.Linear:
    """A linear layer with HugeCTR's initial weights: N(0, sqrt(2 / (in + out)) / 0.8796), biases N(0, sqrt(1 / out)).

    HugeCTR divides by the standard deviation of a truncated normal distribution, but does not truncate.
    """
    layer = nn.Linear(fan_in, fan_out, bias=bias)
    nn.init.normal_(layer.weight, std=(2 / (fan_in + fan_out)) ** 0.5 / 0.87962566)
    if bias:
        nn.init.normal_(layer.bias, std=fan_out**-0.5)
    return layer


def build_network(config: NetworkConfig, seed: int = 0) -> Network:
    """A network of this configuration with the fresh weights that `seed` decides, on the CPU."""
    module = importlib.import_module(f"evergreen.networks.{config.network}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network: Network = module.build(config)
    return network


@torch.no_grad()
def load_dense(network: Network, dense: Mapping[str, NDArray[np.float32]]) -> None:
    """Copies dense parameters, by their `state_dict` names, into `network`.

    Raises:
        ContractError: a parameter is missing, unknown or of another shape.
    """
    parameters = dict(network.named_parameters())
    if wrong := parameters.keys() ^ dense.keys():
        raise ContractError(f"dense parameters have unknown or missing names {sorted(wrong)}")
    for name, parameter in parameters.items():
        if dense[name].shape != tuple(parameter.shape):
            raise ContractError(
                f"dense parameter {name} has shape {dense[name].shape}, expected {tuple(parameter.shape)}"
            )
        parameter.copy_(torch.tensor(dense[name]))


def export_onnx(network: Network, config: NetworkConfig) -> bytes:
    """The network as one ONNX message, for any number of rows; equal weights give equal bytes.

    By torch's TorchScript exporter: it takes 0.3 s where the newer one takes 5 s and two more packages, and its output
    (IR version 8) is read by older ONNX Runtimes too, such as those of NVIDIA's Triton images.
    """
    rows = 2
    vectors = (1, sum(config.widths)) if config.widths else (config.num_categorical, config.embedding_dim)
    example = torch.zeros(rows, config.num_dense), torch.zeros(rows, *vectors)
    content = io.BytesIO()
    was_training = network.training
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the exporter's deprecation
            torch.onnx.export(
                network.eval().cpu(),
                example,
                content,
                input_names=[DENSE_INPUT, EMBEDDINGS_INPUT],
                output_names=[LOGIT_OUTPUT],
                opset_version=OPSET,
                dynamic_axes={name: {0: "rows"} for name in (DENSE_INPUT, EMBEDDINGS_INPUT, LOGIT_OUTPUT)},
                dynamo=False,
            )
    finally:
        network.train(was_training)
    return content.getvalue()
