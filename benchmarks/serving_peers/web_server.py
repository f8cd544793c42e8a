"""The served graph under FastAPI and uvicorn: `python -m benchmarks.serving_peers.web_server MODEL_ONNX PORT`.

One process, one thread of ONNX Runtime, as one instance in Triton has. `/json` takes rows as people first write it,
checked by pydantic; `/binary` takes the two tensors' bytes one behind the other, which is all that can be saved.
"""

from __future__ import annotations

import sys

import numpy as np
import onnxruntime
import uvicorn
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from components.contracts.criteo import MISSING_CATEGORY, NUM_CATEGORICAL, NUM_DENSE

_ROW_BYTES = 4 * NUM_DENSE + 8 * NUM_CATEGORICAL


class PostedRows(BaseModel):
    """Raw rows; null = missing."""

    dense: list[list[float | None]]
    categorical: list[list[int | None]]


def build(graph: str) -> FastAPI:
    """The application around the graph."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    app = FastAPI()

    def score(dense: np.ndarray, categorical: np.ndarray) -> np.ndarray:
        return session.run(["probability"], {"dense": dense, "categorical": categorical})[0].ravel()

    @app.post("/json")
    async def from_json(rows: PostedRows) -> dict[str, list[float]]:
        dense = np.array(rows.dense, dtype=np.float32)
        categorical = [[MISSING_CATEGORY if value is None else value for value in row] for row in rows.categorical]
        return {"probability": score(dense, np.array(categorical, dtype=np.int64)).tolist()}

    @app.post("/binary")
    async def from_binary(request: Request) -> Response:
        body = await request.body()
        num_rows = len(body) // _ROW_BYTES
        dense = np.frombuffer(body, np.float32, num_rows * NUM_DENSE).reshape(num_rows, NUM_DENSE)
        categorical = np.frombuffer(body, np.int64, num_rows * NUM_CATEGORICAL, offset=dense.nbytes)
        return Response(score(dense, categorical.reshape(num_rows, NUM_CATEGORICAL)).tobytes())

    @app.get("/ready")
    async def ready() -> None:
        return None

    return app


if __name__ == "__main__":
    uvicorn.run(build(sys.argv[1]), host="127.0.0.1", port=int(sys.argv[2]), log_level="warning", access_log=False)
