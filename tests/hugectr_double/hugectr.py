"""A strict test double of NVIDIA's `hugectr` for CPUs, with the interface of `hugectr_api.json`.

The test double is imported as `hugectr` if its folder is on `sys.path`. The test double refuses or
ignores the same input as HugeCTR, aborts or hangs at the same errors, and trains the given graph.
Unsupported calls raise NotImplementedError.
"""

from types import SimpleNamespace

import double_api
import double_model
import double_reader
from double_network import USED

__version__ = "24.6.0"


def _solver(values):
    if values["use_mixed_precision"]:
        raise NotImplementedError("the double computes only in float32")


def _embedding(values):
    if values["combiner"] not in ("sum", "mean"):
        raise RuntimeError(f"No such combiner type: {values['combiner']}")


def _layer(values):
    kind = values["layer_type"].name
    arguments = {
        a["name"]: a
        for a in double_api.DOCUMENT["callables"]["hugectr.DenseLayer"]
        if not a["required"]
    }
    given = {
        name for name, a in arguments.items() if values[name] != double_api._default(a["default"])
    }
    if kind in USED and (ignored := given - USED[kind]):
        raise RuntimeError(f"{kind} does not read {sorted(ignored)}")


_CHECKS = {"SparseEmbedding": _embedding, "DenseLayer": _layer}
_MADE = {"CreateSolver": ("Solver", _solver), "CreateOptimizer": ("OptParamsPy", None)}


def _function(name, result, checked):
    result_class = type(result, (double_api.Value,), {"_type": result})

    def create(*args, **kwargs):
        values = double_api.bind(f"hugectr.{name}", args, kwargs)
        if checked is not None:
            checked(values)
        return result_class(values)

    return create


globals().update(double_api.ENUMS)
_implementations = {"Model": double_model.Model, "Core23DataReader64": double_reader.Reader}
_implementations |= {"Core23DataReader32": double_reader.Reader, "LearningRateScheduler": object}
for _name in {full.split(".")[1] for full in double_api.DOCUMENT["callables"]} - {"tools", "data"}:
    if _name in _MADE:
        globals()[_name] = _function(_name, *_MADE[_name])
    elif _name in _implementations:
        _has_init = f"hugectr.{_name}" in double_api.DOCUMENT["callables"]
        globals()[_name] = double_api.method_class(
            _name, _implementations[_name], constructible=_has_init
        )
    else:
        globals()[_name] = double_api.value_class(_name, _CHECKS.get(_name))
double_model.READER_CLASS["64"] = globals()["Core23DataReader64"]
tools = SimpleNamespace()
data = SimpleNamespace()
