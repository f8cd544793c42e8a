"""A small web service that recommends items, and logs the shown items and the clicks.

GET /recommend ranks the catalogue for a user, and POST /click reports a click. GET /health returns
the state of the log, and GET /metrics returns it for Prometheus. Run it with `uvicorn --factory
examples.service.app:from_environment`. README.md in this folder has more.
"""

import os
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, Field

from evergreen.config.spec import Recommender
from evergreen.registry.recommenders import recommender_at
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError
from inference_client import Outcome, RecommenderClient, metrics_text


class Click(BaseModel):
    """A click on a position of a recommended list."""

    request_id: str
    position: int = Field(ge=1, le=100)
    """Position in the list, from 1."""


def create_app(server: str, *, recommender: Recommender, log: str, items: pa.Table) -> FastAPI:
    """Return the service.

    Args:
        server: host:port of Triton's gRPC endpoint.
        recommender: The recommender of the model. The service reads the user's column from the
            recommender's `data.user`.
        log: URL of the event log that the monitor reads.
        items: The catalogue with a row per item, and the model's columns that describe items.

    Raises:
        ContractError: the recommender names no column of the user.
    """
    user_column = recommender.data.user
    if user_column is None:
        raise ContractError(f"recommender {recommender.name} names no user, expected data.user")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # The client publishes all queued records when the block ends, so a shutdown of the service
        # loses no records.
        async with RecommenderClient(server, recommender=recommender, log=log) as client:
            app.state.client = client
            yield

    app = FastAPI(title="Recommendations", lifespan=lifespan)

    @app.exception_handler(ContractError)
    async def refuse(request: Request, error: ContractError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=422)

    @app.exception_handler(TemporaryError)
    @app.exception_handler(PermanentError)
    async def report_failure(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(
            {"detail": str(error)}, status_code=503 if isinstance(error, TemporaryError) else 502
        )

    @app.get("/recommend")
    async def recommend(user: str, k: int = Query(default=5, ge=1, le=100)) -> dict[str, Any]:
        """Return the `k` best items for a user."""
        # The context fills the columns that describe the user. In this example, the column contains
        # a hash of the user's name.
        context = {user_column: [zlib.crc32(user.encode())]}
        ranking = await app.state.client.rank(items, k, context=context, key=user)
        found = [
            {"position": int(position), "item": int(item), "score": float(score)}
            for position, item, score in zip(ranking.positions, ranking.candidates, ranking.scores)
        ]
        return {
            "request_id": ranking.request_id,
            "model_version": ranking.model_version,
            "items": found,
        }

    @app.post("/click", status_code=202)
    async def click(click: Click) -> None:
        """Report a click. The row of an outcome is its position in the list minus 1."""
        app.state.client.report(Outcome(request_id=click.request_id, row=click.position - 1))

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Return the counts of logged records. The service also responds while the log is down."""
        return asdict(app.state.client.log_counts)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> str:
        """Return the counts of logged records for Prometheus."""
        return metrics_text({recommender.name: app.state.client.log_counts})

    return app


def from_environment() -> FastAPI:
    """Return the service with the settings of the environment.

    The variables are EVERGREEN_SERVER, EVERGREEN_RECOMMENDER, EVERGREEN_LOG and EVERGREEN_ITEMS.
    """
    return create_app(
        os.environ["EVERGREEN_SERVER"],
        recommender=recommender_at(Path(os.environ["EVERGREEN_RECOMMENDER"])),
        log=os.environ["EVERGREEN_LOG"],
        items=pq.read_table(os.environ["EVERGREEN_ITEMS"]),
    )
