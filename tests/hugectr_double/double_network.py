"""The dense part: layers by the formulas of HugeCTR's kernels, in PyTorch.

The test double runs the configured graph, so a wrong order, width or tensor becomes visible.
"""

import torch
from torch import Tensor

USED = {
    "ReLU": set(),
    "Concat": {"axis"},
    "Slice": {"ranges"},
    "Reshape": {"leading_dim"},
    "Dropout": {"dropout_rate"},
    "InnerProduct": {"num_output"},
    "MultiCross": {"num_layers", "projection_dim"},
    "BinaryCrossEntropyLoss": set(),
}
"""Arguments that the test double uses, by layer. NVIDIA's layers read a few more arguments."""


class Network:
    """Layers, their parameters in the order of the dense file, and their Adam optimizer."""

    def __init__(self, layers, widths: dict[str, tuple[int, ...]], seed: int) -> None:
        """Create parameters as HugeCTR initialises them.

        `widths` holds each tensor's shape without the batch.
        """
        self._layers, self._widths = (
            [(layer.layer_type.name, layer) for layer in layers],
            dict(widths),
        )
        self._random = torch.Generator().manual_seed(seed)
        self._dropout = torch.Generator().manual_seed(0)
        self.parameters: list[list[Tensor]] = [
            self._make(kind, layer) for kind, layer in self._layers
        ]

    def _make(self, kind: str, layer) -> list[Tensor]:
        shapes = [self._widths[name] for name in layer.bottom_names]
        parameters, tops = [], [shapes[0]]
        if kind == "Reshape":
            if not layer.leading_dim or torch.Size(shapes[0]).numel() % layer.leading_dim:
                raise RuntimeError(f"leading_dim {layer.leading_dim} does not divide {shapes[0]}")
            tops = [(layer.leading_dim,)]
        elif kind == "Concat":
            tops = [(sum(width for (width,) in shapes),)]
        elif kind == "Slice":
            tops = [(stop - start,) for start, stop in layer.ranges]
        elif kind == "InnerProduct":
            (fan_in,), fan_out = shapes[0], layer.num_output
            sd = (2 / (fan_in + fan_out)) ** 0.5 / 0.87962566
            parameters = [
                self._normal((fan_in, fan_out), sd),
                self._normal((fan_out,), fan_out**-0.5),
            ]
            tops = [(fan_out,)]
        elif kind == "MultiCross":
            (n,), k = shapes[0], layer.projection_dim
            if k and layer.num_layers > 1 and (2 * n * k + n) % 4:
                raise RuntimeError(
                    "CUBLAS_STATUS_NOT_SUPPORTED: the second cross layer's weights are not at a "
                    "multiple of 16 bytes"
                )
            for _ in range(layer.num_layers):
                sd = (2 / (n + k)) ** 0.5 if k else n**-0.5
                parameters += (
                    [self._normal((n, k), sd), self._normal((k, n), sd)]
                    if k
                    else [self._normal((n,), sd)]
                )
                parameters.append(torch.zeros(n))
        elif kind == "Dropout" and not 0 < layer.dropout_rate < 1:
            raise RuntimeError(f"dropout rate {layer.dropout_rate} is not in (0, 1)")
        elif kind == "BinaryCrossEntropyLoss" and [*shapes] != [(1,), (1,)]:
            raise RuntimeError("The feature dimension of BCE loss input should be 1")
        if len(tops) != len(layer.top_names):
            raise RuntimeError(f"{kind} has {len(layer.top_names)} tops, expected {len(tops)}")
        self._widths |= dict(zip(layer.top_names, tops))
        return parameters

    def _normal(self, shape: tuple[int, ...], sd: float) -> Tensor:
        return torch.empty(shape).normal_(0, sd, generator=self._random)

    @property
    def flat_parameters(self) -> list[Tensor]:
        """All parameters in file order."""
        return [parameter for parameters in self.parameters for parameter in parameters]

    def run(self, tensors: dict[str, Tensor], *, train: bool) -> tuple[Tensor, Tensor]:
        """Return loss and logits [n] of the input `tensors`."""
        tensors = dict(tensors)
        for (kind, layer), parameters in zip(self._layers, self.parameters):
            inputs = [tensors[name] for name in layer.bottom_names]
            if kind == "BinaryCrossEntropyLoss":
                logits, labels = (value[:, 0] for value in inputs)
                stable = (
                    logits.clamp(min=0) - logits * labels + torch.log1p(torch.exp(-logits.abs()))
                )
                return stable.mean(), logits
            tensors |= dict(
                zip(layer.top_names, self._forward(kind, layer, inputs, parameters, train))
            )
        raise RuntimeError("the graph has no loss")

    def _forward(
        self, kind: str, layer, inputs: list[Tensor], parameters: list[Tensor], train: bool
    ) -> list[Tensor]:
        x = inputs[0]
        if kind == "Reshape":
            return [x.reshape(-1, layer.leading_dim)]
        if kind == "Concat":
            return [torch.cat(inputs, dim=1)]
        if kind == "Slice":
            return [x[:, start:stop] for start, stop in layer.ranges]
        if kind == "ReLU":
            return [x.clamp(min=0)]
        if kind == "InnerProduct":
            return [x @ parameters[0] + parameters[1]]
        if kind == "Dropout":
            if not train:
                return [x]
            keep = 1 - layer.dropout_rate
            return [x * (torch.rand(x.shape, generator=self._dropout) < keep) / keep]
        per_layer, x0 = 3 if layer.projection_dim else 2, x
        for at in range(0, len(parameters), per_layer):
            *weights, bias = parameters[at : at + per_layer]
            if layer.projection_dim:
                x = x0 * (x @ weights[0] @ weights[1] + bias) + x
            else:
                x = x0 * (x @ weights[0])[:, None] + x + bias
        return [x]
