"""A graph in the making: nodes and constants collected in order, then written as the files of a folder.

Takes what `graph.encoding` and `graph.export` add, gives the bytes of one ONNX message, and of `model.data` beside it
with the tables (ONNX's external data: raw little-endian arrays, each at an offset that the message names). A server
maps them, in 10 ms and shared by its instances; in the message, 754 MiB took 4.2 s and twice the memory to open. The
same parts give the same bytes. What the parts compute is left to those who add them.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from evergreen.contracts.serving import PROBABILITY_OUTPUT, Tensor
from evergreen.registry.models import DATA_FILE, GRAPH_FILE
from evergreen.runtime.durable import whole_file, write_whole
from evergreen.runtime.errors import ContractError

OPSET = 17
IR_VERSION = 8
"""What both ONNX Runtime here and the one in Triton's images read."""
MAX_MESSAGE_BYTES = 2**31 - 1
"""Protobuf's limit for one message."""
ALIGNMENT = 4096
"""Of each table in `model.data`: a page, so that ONNX Runtime can map the table instead of reading it."""
_ELEMENT_TYPES = {"FP32": TensorProto.FLOAT, "INT64": TensorProto.INT64}


class Parts:
    """Nodes, constants and tables, collected in order; a table is a constant that lies beside the message."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self._inputs = inputs
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

    def write(self, folder: Path, name: str) -> None:
        """Writes the files of the graph called `name` into `folder`, replacing what was there.

        The message comes last: a folder that has one has the graph.

        Raises:
            ContractError: the message would pass protobuf's limit even without its tables.
        """
        (folder / GRAPH_FILE).unlink(missing_ok=True)
        message = self._message(name, [_beside(*place) for place in self._places()])
        with whole_file(folder / DATA_FILE) as file:
            for _, value, offset in self._places():
                file.write(bytes(offset - file.tell()))
                file.write(value.data)
        write_whole(folder / GRAPH_FILE, message)

    def _places(self) -> Iterator[tuple[str, NDArray[Any], int]]:
        """Each table's name, value and offset in `model.data`."""
        offset = 0
        for name, value in self._tables.items():
            yield name, value, offset
            offset += -(-value.nbytes // ALIGNMENT) * ALIGNMENT

    def _message(self, name: str, tables: list[Any]) -> bytes:
        graph = helper.make_graph(
            self.nodes,
            name,
            [_value(tensor) for tensor in self._inputs],
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
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            producer_name="evergreen",
            ir_version=IR_VERSION,
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
