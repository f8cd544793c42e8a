"""A graph in the making: nodes and constants collected in order, then written as the files of a folder.

Takes what `graph.encoding` and `graph.export` add, gives the bytes of one ONNX message, and of `model.data` beside it
where the tables are large (ONNX's external data: raw little-endian arrays, each at an offset that the message names).
The same parts give the same bytes. What the parts compute is left to those who add them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from components.contracts.serving import CATEGORICAL_INPUT, DENSE_INPUT, PROBABILITY_OUTPUT, Tensor
from components.runtime.durable import whole_file, write_whole
from components.runtime.errors import ContractError
from components.store.models import DATA_FILE, GRAPH_FILE

OPSET = 17
OPSET_IMPORTS = (helper.make_opsetid("", OPSET), helper.make_opsetid("ai.onnx.ml", 4))
IR_VERSION = 8
"""What both ONNX Runtime here and the one in Triton's images read. LabelEncoder of ai.onnx.ml 4 takes its keys as raw
tensors: a fifth of the time of int lists at a million keys."""
MAX_MESSAGE_BYTES = 2**31 - 1
"""Protobuf's limit for one message."""
ALIGNMENT = 4096
"""Of each table in `model.data`: a page, so that ONNX Runtime can map the table instead of reading it."""
_CHUNK_BYTES = 64 * 2**20
_ELEMENT_TYPES = {"FP32": TensorProto.FLOAT, "INT64": TensorProto.INT64}


class Parts:
    """Nodes, constants and tables, collected in order.

    A table is a constant that may lie beside the message; all tables do, or none.
    """

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self._constants: list[Any] = []
        self._tables: dict[str, NDArray[Any]] = {}

    def constant(self, name: str, value: NDArray[Any]) -> str:
        """Adds a constant; answers its name."""
        self._constants.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def table(self, name: str, value: NDArray[Any]) -> str:
        """Adds a table, which is not copied before it is written; answers its name."""
        self._tables[name] = np.ascontiguousarray(value.astype(value.dtype.newbyteorder("<"), copy=False))
        return name

    def node(self, operator: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """Adds a node with one output; answers the output's name."""
        self.nodes.append(helper.make_node(operator, inputs, [output], name=output, **attributes))
        return output

    def write(self, folder: Path, *, inline_bytes: int) -> None:
        """Writes the graph's files into `folder`, replacing what was there.

        The tables go to `model.data` if they have more than `inline_bytes` in all. The message comes last: a folder
        that has one has the graph.

        Raises:
            ContractError: the message would pass protobuf's limit even without its tables.
        """
        (folder / GRAPH_FILE).unlink(missing_ok=True)
        if sum(value.nbytes for value in self._tables.values()) <= inline_bytes:
            message = self._message([numpy_helper.from_array(value, name) for name, value in self._tables.items()])
            (folder / DATA_FILE).unlink(missing_ok=True)
        else:
            message = self._message([_beside(*place) for place in self._places()])
            with whole_file(folder / DATA_FILE) as file:
                for _, value, offset in self._places():
                    file.write(bytes(offset - file.tell()))
                    _write_in_chunks(file, value)
        write_whole(folder / GRAPH_FILE, message)

    def _places(self) -> Iterator[tuple[str, NDArray[Any], int]]:
        """Each table's name, value and offset in `model.data`."""
        offset = 0
        for name, value in self._tables.items():
            yield name, value, offset
            offset += -(-value.nbytes // ALIGNMENT) * ALIGNMENT

    def _message(self, tables: list[Any]) -> bytes:
        graph = helper.make_graph(
            self.nodes,
            "click_model",
            [_value(DENSE_INPUT), _value(CATEGORICAL_INPUT)],
            [_value(PROBABILITY_OUTPUT)],
            initializer=[],
        )
        # The sizes of the pieces are added up: protobuf fails on the size of a message of 2 GB and more.
        size = sum(part.ByteSize() for part in (*self._constants, *tables, *self.nodes))
        if size > MAX_MESSAGE_BYTES:
            raise ContractError(
                f"graph would be a message of {size} bytes, expected at most {MAX_MESSAGE_BYTES}, protobuf's limit"
            )
        graph.initializer.extend([*self._constants, *tables])
        model = helper.make_model(
            graph, opset_imports=list(OPSET_IMPORTS), producer_name="evergreen", ir_version=IR_VERSION
        )
        content: bytes = model.SerializeToString(deterministic=True)
        return content


def _value(tensor: Tensor) -> Any:
    return helper.make_tensor_value_info(tensor.name, _ELEMENT_TYPES[tensor.datatype], ["rows", tensor.width])


def _beside(name: str, value: NDArray[Any], offset: int) -> Any:
    """The entry of a table that lies in `model.data`."""
    tensor = TensorProto(
        name=name,
        dims=value.shape,
        data_type=helper.np_dtype_to_tensor_dtype(value.dtype),
        data_location=TensorProto.EXTERNAL,
    )
    for key, text in (("location", DATA_FILE), ("offset", str(offset)), ("length", str(value.nbytes))):
        tensor.external_data.append(onnx.StringStringEntryProto(key=key, value=text))
    return tensor


def _write_in_chunks(file: BinaryIO, value: NDArray[Any]) -> None:
    content = value.data.cast("B")
    for start in range(0, len(content), _CHUNK_BYTES):
        file.write(content[start : start + _CHUNK_BYTES])
