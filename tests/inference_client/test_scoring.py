"""Tests of the client with a real gRPC server."""

import asyncio
import socket

import grpc
import numpy as np
import pytest

from evergreen.contracts.serving import MAX_BATCH_ROWS
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError
from inference_client.errors import (
    BadReply,
    BadRequest,
    ModelAbsent,
    ServerFault,
    ServerUnavailable,
    VersionsMixed,
)
from inference_client.scoring import ClientSettings, ScoringClient
from inference_client.timing import Timing
from testing.recommenders import SHOP
from testing.served_names import MODEL_NAME
from tests.support.errors import raises

UNAVAILABLE, NOT_FOUND = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND
SWITCHING = (NOT_FOUND, "Request for model 'click_model' version 2 is not at ready state")


def score(url, rows, sleep=asyncio.sleep, **settings):
    async def send_requests():
        # Replacing the random factor by `float` makes the waits deterministic.
        async with ScoringClient(
            url, MODEL_NAME, ClientSettings(**settings), timing=Timing(sleep=sleep, jitter=float)
        ) as client:
            return await client.score(*rows)

    return asyncio.run(send_requests())


@pytest.fixture
def refusing_url():
    """An address at which no server listens. The test occupies the port."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


def test_more_rows_than_batch_are_split_and_joined_in_order(server, make_rows, score_rows):
    rows = make_rows(2 * MAX_BATCH_ROWS + 5)
    scored = score(server.url, rows)
    np.testing.assert_array_equal(scored.scores, score_rows(*rows))
    assert sorted(server.scoring.requests) == [5, MAX_BATCH_ROWS, MAX_BATCH_ROWS]


def test_one_connection_serves_many_requests_within_in_flight_bound(server, make_rows):
    async def send_requests():
        async with ScoringClient(server.url, MODEL_NAME, ClientSettings(max_in_flight=3)) as client:
            return await asyncio.gather(*(client.score(*make_rows(2, seed)) for seed in range(40)))

    assert len(asyncio.run(send_requests())) == 40
    assert 1 <= server.scoring.most_in_flight <= 3


@pytest.mark.parametrize(
    "failure", [(UNAVAILABLE, "Exceeds maximum queue size"), SWITCHING], ids=["busy", "switch"]
)
def test_unavailable_server_is_retried_with_growing_waits(
    server, make_rows, score_rows, sleeps, failure
):
    server.scoring.failures = [failure] * 4
    rows = make_rows(3)
    scored = score(server.url, rows, sleeps, first_backoff_seconds=0.1, max_backoff_seconds=0.3)
    np.testing.assert_array_equal(scored.scores, score_rows(*rows))
    assert sleeps.seconds == [0.1, 0.2, 0.3, 0.3]


def test_retries_end_and_error_names_server(server, make_rows, sleeps):
    server.scoring.always = (UNAVAILABLE, "Exceeds maximum queue size")
    with raises(ServerUnavailable, server.url, "unavailable", "Exceeds maximum queue size"):
        score(server.url, make_rows(3), sleeps, max_attempts=4)
    assert len(sleeps.seconds) == 3


@pytest.mark.parametrize(
    ("failure", "kind", "family"),
    [
        (
            (NOT_FOUND, "Request for unknown model: 'click_model' is not found"),
            ModelAbsent,
            PermanentError,
        ),
        ((grpc.StatusCode.INVALID_ARGUMENT, "unexpected shape"), BadRequest, ContractError),
        (
            (grpc.StatusCode.INTERNAL, "Stub process 'x' is not healthy."),
            ServerFault,
            TemporaryError,
        ),
    ],
    ids=["absent", "refused", "fault"],
)
def test_other_failures_are_translated_and_not_retried(
    server, make_rows, sleeps, failure, kind, family
):
    server.scoring.always = failure
    with pytest.raises(kind, match=failure[1].split(":")[0]) as caught:
        score(server.url, make_rows(3), sleeps)
    assert isinstance(caught.value, family)
    assert sleeps.seconds == []


def test_servers_traceback_does_not_reach_message(server, make_rows):
    server.scoring.always = (grpc.StatusCode.INTERNAL, "failed to run\n  File '/secret/model.py'")
    with pytest.raises(ServerFault) as caught:
        score(server.url, make_rows(1))
    assert "secret" not in str(caught.value)


def test_refused_connection_is_unavailable(refusing_url, make_rows, sleeps):
    with pytest.raises(ServerUnavailable, match=refusing_url):
        score(refusing_url, make_rows(1), sleeps, max_attempts=2)


def test_proxy_in_environment_is_not_used(server, make_rows, score_rows, refusing_url, monkeypatch):
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, f"http://{refusing_url}")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    rows = make_rows(3)
    scored = score(server.url, rows, max_attempts=1)
    np.testing.assert_array_equal(scored.scores, score_rows(*rows))


def test_restarted_server_is_found_again(server, make_rows, score_rows):
    """The gRPC channel must reconnect before the client has used up its retries."""
    rows = make_rows(2)

    async def send_requests():
        async with ScoringClient(server.url, MODEL_NAME) as client:
            await client.score(*rows)
            await asyncio.to_thread(server.kill)
            with pytest.raises(ServerUnavailable):
                await client.score(*rows)
            await asyncio.to_thread(server.start_again)
            return await client.score(*rows)

    np.testing.assert_array_equal(asyncio.run(send_requests()).scores, score_rows(*rows))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda s: s * np.nan, "1 scores|3 scores outside"),
        (lambda s: s + 1, "outside"),
        (lambda s: -s, "outside"),
        (lambda s: s[:-1], r"expected float32 \[3, 1\]"),
        (lambda s: s.ravel(), r"sent float32 \[3\]"),
    ],
    ids=["nan", "above", "below", "short", "flat"],
)
def test_reply_that_is_no_probability_per_row_is_error(server, make_rows, change, text):
    server.scoring.reply_scores = change
    with pytest.raises(BadReply, match=text):
        score(server.url, make_rows(3))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d, c: (d[0], c), r"dense is float32 \[2\], expected float32 \[n, columns\]"),
        (lambda d, c: (d.astype(np.float64), c), "dense is float64"),
        (lambda d, c: (d, c.astype(np.int32)), "categorical is int32"),
        (lambda d, c: (d, c[:3]), "dense has 4 rows and categorical 3"),
        (lambda d, c: (d[:0], c[:0]), "n >= 1"),
    ],
    ids=["width", "dense-type", "category-type", "lengths", "no-rows"],
)
def test_wrong_rows_are_refused_before_they_are_sent(server, make_rows, change, text):
    with pytest.raises(BadRequest, match=text):
        score(server.url, change(*make_rows(4)))
    assert server.scoring.requests == []


@pytest.mark.parametrize("first", [1, 3], ids=["release", "rollback"])
def test_split_request_over_version_switch_ends_with_later_version(
    server, make_rows, score_rows, first
):
    server.scoring.versions, server.scoring.version = [first], 2
    rows = make_rows(2 * MAX_BATCH_ROWS)
    scored = score(server.url, rows, max_in_flight=1)
    assert scored.model_version == 2
    np.testing.assert_array_equal(scored.scores, score_rows(*rows))
    assert len(server.scoring.requests) == 3


def test_versions_that_never_settle_are_error(server, make_rows):
    server.scoring.versions = list(range(1, 100))
    with pytest.raises(VersionsMixed, match=r"versions \["):
        score(server.url, make_rows(2 * MAX_BATCH_ROWS), max_attempts=3)


def test_each_version_gets_its_columns_by_name(server, make_rows, score_rows):
    columns = SHOP.features.columns
    numeric, categorical = columns["numeric"], columns["categorical"]
    server.scoring.columns = {
        # Version 2 has as many columns as the client, but with other names.
        2: {"numeric": ["other", *numeric[1:]], "categorical": [*categorical[1:], categorical[0]]},
        3: {"numeric": list(numeric[1:]), "categorical": ["new", *categorical, "newer"]},
    }
    dense, ids = make_rows(5)
    missing, without_first = np.full((5, 1), -1), dense.copy()
    without_first[:, 0] = np.nan
    expected = {
        1: (dense, ids),
        2: (without_first, np.roll(ids, -1, axis=1)),
        3: (dense[:, 1:], np.hstack([missing, ids, missing])),
    }

    async def send_requests():
        settings = ClientSettings(max_attempts=1)
        async with ScoringClient(
            server.url, MODEL_NAME, settings, columns=SHOP.features.columns
        ) as client:
            for version in (1, 2, 3, 1, 3, 2):
                server.scoring.version = version
                scored = await client.score(dense, ids)
                np.testing.assert_array_equal(scored.scores, score_rows(*expected[version]))
                assert scored.model_version == version

    asyncio.run(send_requests())


def test_rows_are_refused_if_server_rejects_them_despite_its_columns(server, make_rows):
    server.scoring.failures = [(grpc.StatusCode.INVALID_ARGUMENT, "no")]

    async def send_requests():
        async with ScoringClient(server.url, MODEL_NAME, columns=SHOP.features.columns) as client:
            await client.score(*make_rows(2))

    with raises(BadRequest, "refused", "no"):
        asyncio.run(send_requests())
