"""The one function of TensorFlow that TFDV calls to infer a schema or find anomalies, without TensorFlow.

`tensorflow_data_validation.api.validation_api` hands serialized protos through `tf.compat.as_bytes`; TensorFlow takes
4 s and 400 MB to be imported for it. Every other name is TensorFlow's own, imported when it is asked for.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


def as_bytes(bytes_or_text: Any, encoding: str = "utf-8") -> bytes:
    """What `tf.compat.as_bytes` gives: text encoded, bytes as they are.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(bytes_or_text, str):
        return bytes_or_text.encode(encoding)
    if isinstance(bytes_or_text, bytes | bytearray):
        return bytes(bytes_or_text)
    raise TypeError(f"Expected binary or unicode string, got {bytes_or_text!r}")


def spare(module: ModuleType) -> None:
    """Lets `module`, which imported TensorFlow as `tf`, call `tf.compat.as_bytes` without it."""
    if getattr(vars(module).get("tf"), "__name__", None) == "tensorflow":
        vars(module)["tf"] = _Beside("tensorflow", compat=_Beside("tensorflow.compat", as_bytes=as_bytes))


class _Beside:
    """Some names of a module, and its own ones behind them."""

    def __init__(self, name: str, **names: Any) -> None:
        self._name = name
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)
