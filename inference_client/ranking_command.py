"""The `rank` command: ranks the rows of a file for one context, prints the list and publishes it to the log."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from components.logs.locations import open_publisher
from components.runtime.errors import ContractError
from inference_client.client import ClientSettings
from inference_client.publisher import RecordPublisher
from inference_client.ranking import Ranking, rank
from inference_client.replay import SHADOW_WAIT_SECONDS
from inference_client.routing import open_scorer
from inference_client.row_files import first_rows
from inference_client.scorer import FeatureRows

MAX_CANDIDATES = 1_000_000


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """What to rank, where, and whom to tell."""

    server: str
    context: Path
    """File of rows, of which one is the context."""
    context_row: int = 0
    """Which, from 0."""
    candidates: Path
    k: int
    key: str | None = None
    """Whose list it is; see `ranking.rank`."""
    session_id: str | None = None
    log_url: str | None = None
    """Where the list is published; None = nowhere."""
    plan_uri: str | None = None


def rank_files(settings: RankSettings, client: ClientSettings, out: IO[str]) -> Ranking:
    """Writes {position, candidate, score, model_version, session_id} per place to `out`, the best first.

    The record is in the log before the list is printed: a click on what was shown must find it there.

    Raises:
        ContractError: a file cannot be read, lacks the context's row, or holds no or too many candidates.
        TemporaryError, PermanentError: the server or the log failed.
    """
    context = _context(settings)
    candidates = first_rows(settings.candidates, MAX_CANDIDATES + 1)
    if len(candidates) > MAX_CANDIDATES:
        raise ContractError(f"{settings.candidates} holds more than {MAX_CANDIDATES} rows, expected fewer candidates")
    ranking = asyncio.run(_rank(settings, client, context, candidates))
    for place, candidate, score in zip(ranking.positions, ranking.candidates, ranking.scores):
        line: dict[str, object] = {"position": int(place), "candidate": int(candidate), "score": float(score)}
        line |= {"model_version": ranking.model_version, "session_id": ranking.session_id}
        out.write(json.dumps(line) + "\n")
    return ranking


def _context(settings: RankSettings) -> FeatureRows:
    row = settings.context_row
    if row < 0:
        raise ContractError(f"context_row is {row}, expected 0 or more")
    rows = first_rows(settings.context, row + 1)
    if len(rows) <= row:
        raise ContractError(f"context_row is {row}, but {settings.context} holds {len(rows)} rows")
    return FeatureRows(dense=rows.dense[row : row + 1], categorical=rows.categorical[row : row + 1])


async def _rank(
    settings: RankSettings, client: ClientSettings, context: FeatureRows, candidates: FeatureRows
) -> Ranking:
    # Opened first: a list that cannot be logged is not to be shown.
    log = open_publisher(settings.log_url) if settings.log_url else None
    try:
        async with open_scorer(settings.server, client, plan_uri=settings.plan_uri) as scorer:
            ranking = await rank(
                scorer, context, candidates, settings.k, session_id=settings.session_id, key=settings.key
            )
            if log is not None:
                publisher = RecordPublisher(log, source=ranking.session_id)
                publisher.add(await ranking.record_with_shadow(time.time(), SHADOW_WAIT_SECONDS))
                await publisher.drain()
            return ranking
    finally:
        if log is not None:
            log.close()
