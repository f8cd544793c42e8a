"""A web service of one page that recommends items and logs what it showed and what was clicked.

GET /recommend ranks the catalogue for a user, POST /click reports a click on it, GET /health says how the log is doing,
and GET /metrics the same to Prometheus.
Run it with `uvicorn --factory examples.service.app:from_environment`; see README.md beside this file.
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
    """A click on a place of a list that was recommended."""

    request_id: str
    position: int = Field(ge=1, le=100)
    """From 1, as in the list."""


def create_app(server: str, *, recommender: Recommender, log: str, items: pa.Table) -> FastAPI:
    """The service.

    Args:
        server: host:port of Triton's gRPC endpoint.
        recommender: What the model's columns are; `data.user` says which is the user's.
        log: URL of the log that the monitor reads.
        items: The catalogue, a row per item, with the model's columns that describe items.
    """
    user_column = recommender.data.user
    if user_column is None:
        raise ContractError(f"recommender {recommender.name} names no user, expected data.user")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # Leaving the block publishes what is queued, so the server's shutdown loses no record.
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
        return JSONResponse({"detail": str(error)}, status_code=503 if isinstance(error, TemporaryError) else 502)

    @app.get("/recommend")
    async def recommend(user: str, k: int = Query(default=5, ge=1, le=100)) -> dict[str, Any]:
        """The `k` best items for a user."""
        # What is known of the user fills the columns that an item lacks; here it is a hash of the name.
        context = {user_column: [zlib.crc32(user.encode())]}
        ranking = await app.state.client.rank(items, k, context=context, key=user)
        found = [
            {"position": int(position), "item": int(item), "score": float(score)}
            for position, item, score in zip(ranking.positions, ranking.candidates, ranking.scores)
        ]
        return {"request_id": ranking.request_id, "model_version": ranking.model_version, "items": found}

    @app.post("/click", status_code=202)
    async def click(click: Click) -> None:
        """Reports a click; the row of an outcome is its place in the list less 1."""
        app.state.client.tell(Outcome(request_id=click.request_id, row=click.position - 1))

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """What became of the records so far; the service answers also while the log is unavailable."""
        return asdict(app.state.client.log_counts)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> str:
        """The same for Prometheus."""
        return metrics_text({recommender.name: app.state.client.log_counts})

    return app


def from_environment() -> FastAPI:
    """The service of the environment's EVERGREEN_SERVER, EVERGREEN_RECOMMENDER, EVERGREEN_LOG and EVERGREEN_ITEMS."""
    return create_app(
        os.environ["EVERGREEN_SERVER"],
        recommender=recommender_at(Path(os.environ["EVERGREEN_RECOMMENDER"])),
        log=os.environ["EVERGREEN_LOG"],
        items=pq.read_table(os.environ["EVERGREEN_ITEMS"]),
    )
