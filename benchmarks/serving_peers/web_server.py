"""Serve the graph under FastAPI and uvicorn.

`python -m benchmarks.serving_peers.web_server MODEL_ONNX PORT` runs one process with one thread of
ONNX Runtime, like one instance in Triton. A request to `/score` contains the bytes of both tensors
one after the other, because JSON would be slower.
"""

import sys

import numpy as np
import onnxruntime
import uvicorn
from fastapi import FastAPI, Request, Response

from evergreen.contracts.criteo import NUM_CATEGORICAL, NUM_DENSE

_ROW_BYTES = 4 * NUM_DENSE + 8 * NUM_CATEGORICAL


def build(graph: str) -> FastAPI:
    """Return a web application that scores rows with the graph."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    app = FastAPI()

    @app.post("/score")
    async def score(request: Request) -> Response:
        body = await request.body()
        num_rows = len(body) // _ROW_BYTES
        dense = np.frombuffer(body, np.float32, num_rows * NUM_DENSE).reshape(num_rows, NUM_DENSE)
        categorical = np.frombuffer(body, np.int64, num_rows * NUM_CATEGORICAL, offset=dense.nbytes)
        rows = {"dense": dense, "categorical": categorical.reshape(num_rows, NUM_CATEGORICAL)}
        return Response(session.run(["probability"], rows)[0].tobytes())

    @app.get("/ready")
    async def ready() -> None:
        return None

    return app


if __name__ == "__main__":
    uvicorn.run(
        build(sys.argv[1]),
        host="127.0.0.1",
        port=int(sys.argv[2]),
        log_level="warning",
        access_log=False,
    )
