"""A simulated GPU: tensors whose device is `cuda:0`, and whose values are computed on the CPU.

An operation on tensors of both devices is an error, as on a real GPU. If NumPy reads a tensor of
the GPU, this is an error too. Sums and products are those of the CPU, so scores can be compared.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("cuda", 0)
TOTAL_BYTES = 80 << 30
_FROM_HOST = {"_to_copy", "copy_", "index", "index_put_"}
"""Operators that accept tensors of the CPU beside tensors of the GPU."""


class GpuTensor(Tensor):
    """A tensor on the simulated GPU."""

    @staticmethod
    def __new__(cls, on_host):
        """Make a tensor of the simulated GPU from a tensor of the CPU."""
        strides = {"strides": on_host.stride()} if on_host.layout == torch.strided else {}
        self = Tensor._make_wrapper_subclass(
            cls, on_host.size(), dtype=on_host.dtype, layout=on_host.layout, **strides
        )
        self.on_host = on_host
        return self

    @property
    def device(self):
        """The simulated GPU."""
        return DEVICE

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        """Refuse operators outside of `simulated_gpu`."""
        raise RuntimeError(f"{operator} of a GPU's tensor outside of `simulated_gpu`")


class _Calls(TorchFunctionMode):
    """Handles calls in which torch checks the device before it runs an operator."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        # If the device has no index, torch asks the GPU's driver for the index of the current GPU.
        args = [DEVICE if _is_device(each, "cuda") else each for each in args]
        kwargs = {
            name: DEVICE if _is_device(each, "cuda") else each
            for name, each in (kwargs or {}).items()
        }
        if function is torch.tensor and kwargs.get("device") == DEVICE:
            return torch.tensor(*args, **{**kwargs, "device": "cpu"}).to(DEVICE)
        if args and isinstance(args[0], GpuTensor):
            if function is Tensor.numpy:
                raise TypeError("can't convert cuda:0 device type tensor to numpy")
            to_host = any(_is_device(each, "cpu") for each in (*args[1:], *kwargs.values()))
            if function is Tensor.cpu or (function is Tensor.to and to_host):
                return args[0].detach().on_host.clone()
        return function(*args, **kwargs)


def _is_device(value, name):
    return isinstance(value, (str, torch.device)) and str(value) == name


class _Operators(TorchDispatchMode):
    """Runs the operators of the GPU's tensors on the CPU."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name, (flat, _) = operator.overloadpacket.__name__, tree_flatten((args, kwargs))
        tensors = [each for each in flat if isinstance(each, Tensor)]
        ours = {id(each.on_host): each for each in tensors if isinstance(each, GpuTensor)}
        is_on_gpu = bool(ours) or kwargs.get("device") == DEVICE
        if kwargs.get("device") == DEVICE:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        has_host = any(each.dim() and not isinstance(each, GpuTensor) for each in tensors)
        if ours and has_host and name not in _FROM_HOST:
            raise RuntimeError(f"{name}: Expected all tensors to be on the same device")

        def wrapped(found):
            if not isinstance(found, Tensor) or not is_on_gpu:
                return found
            return ours[id(found)] if id(found) in ours else GpuTensor(found)

        bare = tree_map(lambda each: getattr(each, "on_host", each), (args, kwargs))
        found = operator(*bare[0], **bare[1])
        return args[0] if name == "copy_" else tree_map(wrapped, found)


@contextmanager
def simulated_gpu():
    """Provide the simulated GPU to the current thread during the `with` block."""
    with _Calls(), _Operators():
        yield


class _Threads(ThreadPoolExecutor):
    """Thread pool whose threads can use the simulated GPU."""

    def submit(self, function, *args, **kwargs):
        """Run a function in a thread."""

        def run():
            with simulated_gpu():
                return function(*args, **kwargs)

        return super().submit(run)


def simulate_gpu(monkeypatch, *modules):
    """Replace torch's functions for GPUs, and the thread pools of the modules."""
    facts = SimpleNamespace(name="simulated GPU", total_memory=TOTAL_BYTES)
    replaced = {
        "_lazy_init": lambda: None,
        "synchronize": lambda *device: None,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda: None,
        "max_memory_allocated": lambda: TOTAL_BYTES // 8,
        "get_device_properties": lambda device: facts,
        "get_rng_state": lambda device: torch.get_rng_state(),
        "set_rng_state": lambda state, device: None,
    }
    for name, function in replaced.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self.clone())
    # By default, `Module.to` would keep the CPU's parameters and only replace their data.
    monkeypatch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
    for module in modules:
        monkeypatch.setattr(module, "ThreadPoolExecutor", _Threads)
