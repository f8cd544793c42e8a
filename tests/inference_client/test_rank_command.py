"""Ranking as a library and as a command: the best by NumPy's own sort, and the list in the log."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest

from components.contracts.criteo import CATEGORICAL, DENSE, FEATURES
from components.contracts.serving import MAX_BATCH_ROWS
from components.runtime.errors import ContractError
from inference_client.client import ClientSettings, ScoringClient
from inference_client.errors import BadReply
from inference_client.ranking import FeatureRows, rank


def ask(server, candidates, k, context=None, **settings):
    if context is None:
        context = FeatureRows(dense=np.ones((1, 13), np.float32), categorical=np.full((1, 26), 5))

    async def run():
        async with ScoringClient(server.url, ClientSettings(**settings)) as client:
            return await rank(client, context, candidates, k)

    return asyncio.run(run())


@pytest.fixture
def candidates(make_rows):
    def make(n, seed=1):
        dense, categorical = make_rows(n, seed)
        filled = np.where(categorical < 0, 5, categorical)
        return FeatureRows(dense=np.where(np.isnan(dense), 1, dense), categorical=filled)

    return make


def test_thousands_are_ranked_in_chunks_by_one_version(server, candidates, score_rows):
    rows = candidates(2 * MAX_BATCH_ROWS + 9)
    server.scoring.versions, server.scoring.version = [1], 2
    ranking = ask(server, rows, 25, max_in_flight=1)
    expected = score_rows(rows.dense, rows.categorical)
    np.testing.assert_array_equal(ranking.candidates, np.argsort(-expected, kind="stable")[:25])
    np.testing.assert_array_equal(ranking.scores, expected[ranking.candidates])
    assert ranking.model_version == 2
    assert max(server.scoring.requests) == MAX_BATCH_ROWS


def test_more_places_than_candidates_rank_all_of_them(server, candidates):
    ranking = ask(server, candidates(7), 100)
    assert sorted(ranking.candidates) == list(range(7))
    assert ranking.positions.tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_equal_scores_keep_the_order_given(server, candidates):
    server.scoring.reply_scores = lambda scores: np.round(scores, 1)
    rows = candidates(500)
    ranking = ask(server, rows, 60)
    for score in np.unique(ranking.scores):
        assert (np.diff(ranking.candidates[ranking.scores == score]) > 0).all()
    assert (np.diff(ranking.scores) <= 0).all()
    assert len(np.unique(ranking.scores)) < 60, "the rounding made ties"


def test_scores_that_are_no_numbers_make_no_list(server, candidates):
    def spoil(scores):
        scores[3] = np.nan
        return scores

    server.scoring.reply_scores = spoil
    with pytest.raises(BadReply, match="1 scores outside"):
        ask(server, candidates(10), 3)


@pytest.mark.parametrize(
    ("n", "k", "text"), [(5, 0, "k is 0"), (5, 5000, "k is 5000"), (0, 3, "candidates have shapes")]
)
def test_impossible_lists_are_refused(server, candidates, n, k, text):
    with pytest.raises(ContractError, match=text):
        ask(server, candidates(n), k)


@pytest.fixture
def files(tmp_path, raw_table):
    """A context file, and candidates that lack the user's side (I1..I13, C1..C5)."""
    pq.write_table(raw_table(3, seed=5), tmp_path / "users.parquet")
    table = raw_table(200, seed=6)
    lines = [",".join(FEATURES)]
    for row in table.select(list(CATEGORICAL)).to_pylist():
        own = ["" if value is None else f"{value:x}" for value in list(row.values())[5:]]
        lines.append(",".join([""] * 18 + own))
    (tmp_path / "items.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


def command(server, folder, *extra):
    line = [sys.executable, "-m", "inference_client", "rank", "--server", server.url, *extra]
    line += ["--context", folder / "users.parquet", "--candidates", folder / "items.csv"]
    return subprocess.run(list(map(str, line)), capture_output=True, text=True, timeout=120)


def test_the_command_prints_the_list_and_the_log_holds_it(server, files, read_log, raw_table, score_rows):
    log = f"sqlite:///{files}/log.db"
    done = command(server, files, "--context-row", 2, "--k", 5, "--session-id", "list-1", "--log", log)
    assert done.returncode == 0, done.stderr
    user, items = raw_table(3, seed=5).slice(2, 1), raw_table(200, seed=6)
    dense = np.repeat([[np.nan if user[c][0].as_py() is None else user[c][0].as_py() for c in DENSE]], 200, axis=0)
    columns = []
    for i, name in enumerate(CATEGORICAL):
        mine = np.full(200, user[name].fill_null(-1)[0].as_py())
        theirs = items[name].fill_null(-1).to_numpy()
        columns.append(mine if i < 5 else np.where(theirs < 0, mine, theirs))
    categorical = np.stack(columns, axis=1)
    expected = score_rows(dense.astype(np.float32), categorical)
    best = np.argsort(-expected, kind="stable")[:5]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["candidate"] for line in lines] == best.tolist()
    assert [line["position"] for line in lines] == [1, 2, 3, 4, 5]
    np.testing.assert_array_equal(np.array([line["score"] for line in lines], np.float32), expected[best])
    [record] = read_log(files / "log.db")
    assert (record.session_id, record.positions.tolist(), record.model_version) == ("list-1", [1, 2, 3, 4, 5], 1)
    np.testing.assert_array_equal(record.scores, expected[best])
    np.testing.assert_array_equal(record.categorical, categorical[best])


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        (["--k", 3, "--context-row", 3], "context_row is 3, but .*users.parquet holds 3 rows"),
        (["--k", 0], "k is 0, expected 1..2048"),
    ],
    ids=["row", "k"],
)
def test_misuse_of_the_command_is_one_line_and_exit_2(server, files, extra, text):
    done = command(server, files, *extra)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert re.search(text, done.stderr)
