"""Collect the nodes and constants of a graph, and write them as files.

`evergreen.serving.graph.encoding` and `evergreen.serving.graph.export` add the parts. The output is
one ONNX message and a file `model.data` with the tables, in the same folder. The format is ONNX's
external data: raw little-endian arrays at offsets that the message contains. A server maps the
tables in 10 ms, and its instances share the tables. When tables of 754 MiB were inside the message,
opening the message took 4.2 s and twice the memory. The output is deterministic.
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
"""ONNX IR version that this package's ONNX Runtime and the one in Triton's images can both read."""
MAX_MESSAGE_BYTES = 2**31 - 1
"""Protobuf's limit for the size of one message in bytes."""
ALIGNMENT = 4096
"""Alignment of each table in `model.data` in bytes. The alignment is one page, so that ONNX Runtime
can map the table instead of reading it."""
_ELEMENT_TYPES = {"FP32": TensorProto.FLOAT, "INT64": TensorProto.INT64}


class Parts:
    """Nodes, constants and tables in the order of their addition.

    A table is a constant that is stored in the file `model.data` instead of the protobuf message.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self._inputs = inputs
        self.nodes: list[Any] = []
        self._constants: list[Any] = []
        self._tables: dict[str, NDArray[Any]] = {}

    def constant(self, name: str, value: NDArray[Any]) -> str:
        """Add a constant, and return its name."""
        self._constants.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def table(self, name: str, value: NDArray[Any]) -> str:
        """Add a table, and return its name. The table is not copied before it is written."""
        self._tables[name] = np.ascontiguousarray(
            value.astype(value.dtype.newbyteorder("<"), copy=False)
        )
        return name

    def node(self, operator: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """Add a node with one output, and return the output's name."""
        self.nodes.append(helper.make_node(operator, inputs, [output], name=output, **attributes))
        return output

    def write(self, folder: Path, name: str) -> None:
        """Write the graph's files into `folder`, and replace existing ones.

        The ONNX message is written last, so a folder with a message is complete.

        Raises:
            ContractError: the message exceeds protobuf's limit even without its tables.
        """
        (folder / GRAPH_FILE).unlink(missing_ok=True)
        message = self._message(name, [_external_table(*table) for table in self._table_offsets()])
        with whole_file(folder / DATA_FILE) as file:
            for _, value, offset in self._table_offsets():
                file.write(bytes(offset - file.tell()))
                file.write(value.data)
        write_whole(folder / GRAPH_FILE, message)

    def _table_offsets(self) -> Iterator[tuple[str, NDArray[Any], int]]:
        """Yield each table's name, value and offset in `model.data`."""
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
        # Add up the sizes of the parts, because protobuf cannot compute the size of a message of 2
        # GB or more.
        size = sum(part.ByteSize() for part in (*self._constants, *tables, *self.nodes))
        if size > MAX_MESSAGE_BYTES:
            raise ContractError(
                f"graph would be a message of {size} bytes, expected at most {MAX_MESSAGE_BYTES}, "
                "protobuf's limit"
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
    return helper.make_tensor_value_info(
        tensor.name, _ELEMENT_TYPES[tensor.datatype], ["rows", tensor.width]
    )


def _external_table(name: str, value: NDArray[Any], offset: int) -> Any:
    """Return the message's entry for a table in `model.data`."""
    tensor = TensorProto(
        name=name,
        dims=value.shape,
        data_type=helper.np_dtype_to_tensor_dtype(value.dtype),
        data_location=TensorProto.EXTERNAL,
    )
    for key, text in (
        ("location", DATA_FILE),
        ("offset", str(offset)),
        ("length", str(value.nbytes)),
    ):
        tensor.external_data.append(onnx.StringStringEntryProto(key=key, value=text))
    return tensor
