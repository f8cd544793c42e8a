"""Tests of TLS and tokens with real gRPC servers.

Further tests check the errors for invalid certificates and tokens.
"""

import asyncio
import logging

import grpc
import numpy as np
import pytest

from evergreen.runtime.errors import ContractError
from inference_client import transport as transport_module
from inference_client.access import TOKEN_SECONDS, ServerAccess, Token
from inference_client.errors import AccessDenied, ServerUnavailable
from inference_client.scoring import ClientSettings, ScoringClient
from testing.recommenders import SHOP
from testing.served_names import MODEL_NAME
from tests.support.certificates import Authority
from tests.support.errors import raises
from tests.support.triton_double import GrpcTriton


@pytest.fixture(scope="module")
def authority():
    return Authority()


@pytest.fixture
def files(tmp_path):
    """Writes each content to the file that its keyword names, and returns the paths."""

    def write(**contents):
        paths = {name: tmp_path / name for name in contents}
        for name, path in paths.items():
            content = contents[name]
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return paths

    return write


@pytest.fixture
def secure(authority):
    """`secure(*names, mutual=...)` starts a server with a certificate for `names` and 127.0.0.1."""
    running = []

    def run(*names, mutual=False):
        pair = authority.certificate(*names, address="127.0.0.1")
        credentials = grpc.ssl_server_credentials(
            [pair], authority.pem if mutual else None, require_client_auth=mutual
        )
        running.append(GrpcTriton(credentials=credentials))
        return running[-1]

    yield run
    for each in running:
        each.close()


def score(url, rows, *, attempts=1, **access):
    async def run():
        settings = ClientSettings(
            max_attempts=attempts, deadline_seconds=20, access=ServerAccess(**access)
        )
        async with ScoringClient(url, MODEL_NAME, settings) as client:
            return await client.score(*rows)

    return asyncio.run(run())


def test_server_with_certificate_of_known_authority_gets_requests(
    secure, authority, files, make_rows, score_rows
):
    rows = make_rows(2)
    answer = score(secure("triton").url, rows, tls=True, **files(ca_file=authority.pem))
    np.testing.assert_array_equal(answer.scores, score_rows(*rows))


def test_server_of_another_authority_or_without_tls_gets_no_request(
    secure, server, files, make_rows
):
    other = secure("triton")
    with pytest.raises(ServerUnavailable, match="(?i)handshake|certificate"):
        score(other.url, make_rows(1), tls=True, **files(ca_file=Authority().pem))
    with pytest.raises(ServerUnavailable):
        score(server.url, make_rows(1), tls=True, **files(ca_file=Authority().pem))
    with pytest.raises(ServerUnavailable):
        score(other.url, make_rows(1))
    assert other.scoring.requests == server.scoring.requests == []


@pytest.mark.parametrize("name", ["triton", "another"])
def test_certificate_is_checked_against_configured_name(
    secure, authority, files, make_rows, monkeypatch, name
):
    running = secure("triton")

    async def resolve(server):
        return [f"ipv4:{running.url}"]

    monkeypatch.setattr(transport_module, "resolve", resolve)
    given = files(ca_file=authority.pem)
    if name == "triton":
        assert score(f"dns:///{name}:8001", make_rows(2), tls=True, **given).model_version == 1
    else:
        with pytest.raises(ServerUnavailable):
            score(f"dns:///{name}:8001", make_rows(2), tls=True, **given)
        assert running.scoring.requests == []


def test_client_sends_its_certificate_if_server_requests_one(secure, authority, files, make_rows):
    running = secure("triton", mutual=True)
    key, certificate = authority.certificate("a site")
    given = files(ca_file=authority.pem, key_file=key, certificate_file=certificate)
    assert score(running.url, make_rows(2), tls=True, **given).model_version == 1
    with pytest.raises(ServerUnavailable):
        score(running.url, make_rows(2), tls=True, ca_file=given["ca_file"])


@pytest.mark.parametrize(
    "columns", [None, SHOP.features.columns], ids=["", "also a request for columns"]
)
def test_each_call_carries_token(secure, authority, files, make_rows, columns):
    running = secure("triton")
    running.token = "s3cret"
    given = files(ca_file=authority.pem, token_file="s3cret\n")

    async def run(**more):
        settings = ClientSettings(access=ServerAccess(tls=True, ca_file=given["ca_file"], **more))
        async with ScoringClient(running.url, MODEL_NAME, settings, columns=columns) as client:
            return await client.score(*make_rows(2))

    assert asyncio.run(run(token_file=given["token_file"])).model_version == 1
    for wrong in ({}, files(token_file="another")):
        with raises(AccessDenied, "denies access", "is no token"):
            asyncio.run(run(**wrong))


def test_token_is_read_again_and_last_good_one_stays(tmp_path, caplog):
    now, path = [0.0], tmp_path / "token"
    path.write_text("first")
    token = Token(path, lambda: now[0])
    path.write_text("second\n")
    assert token.headers() == {"authorization": "Bearer first"}
    now[0] += TOKEN_SECONDS
    assert token.headers() == {"authorization": "Bearer second"}
    now[0] += TOKEN_SECONDS
    path.unlink()
    with caplog.at_level(logging.WARNING):
        assert token.headers() == {"authorization": "Bearer second"}
    assert "the previous token is used" in caplog.text
    assert Token(None).headers() is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"token_file": "absent"}, "token_file is .*absent without tls"),
        ({"ca_file": "absent"}, "ca_file is .*absent without tls"),
        (
            {"tls": True, "key_file": "absent"},
            "certificate_file is None and key_file .*absent, expected both or none",
        ),
        ({"tls": True, "ca_file": "absent"}, "absent cannot be read: No such file"),
        ({"tls": True, "token_file": "absent"}, "absent cannot be read: No such file"),
        ({"tls": True, "token_file": "empty"}, "empty contains no token"),
        ({"tls": True, "token_file": "lines"}, "lines contains no token"),
    ],
)
def test_impossible_settings_are_named(tmp_path, wrong, message):
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "lines").write_text("a\nb")
    given = {
        name: value if value is True else str(tmp_path / value) for name, value in wrong.items()
    }
    with pytest.raises(ContractError, match=message):
        ScoringClient("127.0.0.1:1", MODEL_NAME, ClientSettings(access=ServerAccess(**given)))
