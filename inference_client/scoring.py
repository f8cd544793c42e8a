"""Scores the rows of a file and prints a JSON line for each: the `score` command."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import IO

from inference_client.client import ClientSettings, ScoringClient
from inference_client.row_files import read_rows, row_files


def score_file(server: str, path: Path, out: IO[str], *, settings: ClientSettings, limit: int | None = None) -> int:
    """Writes {row, score, model_version} per row of `path` to `out`; returns the number of rows scored.

    Raises:
        ContractError: the file has no raw feature columns, or the server refused the request.
        TemporaryError: the server is unavailable, or did not answer in time.
        PermanentError: the model is absent, or its answer is unusable.
    """
    return asyncio.run(_score_file(server, path, out, settings, limit))


async def _score_file(server: str, path: Path, out: IO[str], settings: ClientSettings, limit: int | None) -> int:
    done = 0
    async with ScoringClient(server, settings) as client:
        for dense, categorical, _ in read_rows(row_files(path), labelled=False):
            rows = slice(None if limit is None else limit - done)
            if not len(dense[rows]):
                break
            scored = await client.score(dense[rows], categorical[rows])
            for score in scored.scores.tolist():
                out.write(json.dumps({"row": done, "score": score, "model_version": scored.model_version}) + "\n")
                done += 1
    return done
