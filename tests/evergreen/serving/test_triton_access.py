"""Tests of TLS and a token for Triton, over a real gRPC server with a certificate of a test CA."""

import subprocess
from contextlib import ExitStack

import grpc
import pytest

from controller.deployment_target import add_target_flags, target_of
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError
from evergreen.runtime.flags import CommandParser
from evergreen.serving.servers import Triton, TritonAccess
from testing.served_names import MODEL_NAME
from tests.support.triton_double import GrpcTriton


def openssl(*words):
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    """A CA, a server's certificate for the name `triton`, a client certificate, and another CA."""
    folder = tmp_path_factory.mktemp("pki")
    for ca in ("ca", "other"):
        openssl(
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            2,
            "-subj",
            f"/CN={ca}",
            "-keyout",
            folder / f"{ca}.key",
            "-out",
            folder / f"{ca}.pem",
        )
    for name in ("triton", "client"):
        (folder / f"{name}.ext").write_text(f"subjectAltName=DNS:{name}\n")
        openssl(
            "req",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-subj",
            f"/CN={name}",
            "-keyout",
            folder / f"{name}.key",
            "-out",
            folder / f"{name}.csr",
        )
        openssl(
            "x509",
            "-req",
            "-in",
            folder / f"{name}.csr",
            "-CA",
            folder / "ca.pem",
            "-CAkey",
            folder / "ca.key",
            "-CAcreateserial",
            "-days",
            2,
            "-extfile",
            folder / f"{name}.ext",
            "-out",
            folder / f"{name}.pem",
        )
    return folder


@pytest.fixture
def secured(deployment, pki):
    """Starts a server that requires TLS, and optionally a client certificate or token.

    `secured()` returns the server's address.
    """
    deployment.release(1)
    with ExitStack() as started:

        def start(*, mutual=False, token=None):
            pair = [((pki / "triton.key").read_bytes(), (pki / "triton.pem").read_bytes())]
            roots = (pki / "ca.pem").read_bytes() if mutual else None
            credentials = grpc.ssl_server_credentials(pair, roots, require_client_auth=mutual)
            server = started.enter_context(GrpcTriton(deployment.servers[0], credentials))
            server.token = token
            return server.url

        yield start


def live(url, **access):
    triton = Triton(url, TritonAccess(**{name: str(value) for name, value in access.items()}))
    try:
        triton.check_live()
        return triton.is_ready(MODEL_NAME, 1)
    finally:
        triton.close()


def test_server_with_tls_is_reached_by_its_ca_and_by_no_other_way(secured, pki):
    url = secured()
    assert live(url, ca=pki / "ca.pem", name="triton")
    for access in (
        {},
        {"ca": pki / "other.pem", "name": "triton"},
        {"ca": pki / "ca.pem", "name": "another"},
    ):
        with pytest.raises(TemporaryError):
            live(url, **access)


def test_server_that_requires_certificate_gets_it(secured, pki):
    url = secured(mutual=True)
    own = {"certificate": pki / "client.pem", "key": pki / "client.key"}
    assert live(url, ca=pki / "ca.pem", name="triton", **own)
    with pytest.raises(TemporaryError):
        live(url, ca=pki / "ca.pem", name="triton")


def test_token_is_shown_at_each_call_as_its_file_is_then(secured, pki, tmp_path):
    url = secured(token="first")  # noqa: S106
    file = tmp_path / "token"
    file.write_text("first\n")
    triton = Triton(url, TritonAccess(ca=str(pki / "ca.pem"), name="triton", token_file=str(file)))
    assert triton.is_ready(MODEL_NAME, 1)
    file.write_text("second")
    with pytest.raises(PermanentError, match="is no token"):
        triton.is_ready(MODEL_NAME, 1)
    file.unlink()
    with pytest.raises(TemporaryError, match=f"token file {file} cannot be read"):
        triton.is_ready(MODEL_NAME, 1)
    triton.close()
    with pytest.raises(PermanentError, match="is no token"):
        live(url, ca=pki / "ca.pem", name="triton")


@pytest.mark.parametrize("by", ["flags", "variables"])
def test_commands_take_it_from_flags_and_from_environment(
    secured, pki, deployment, monkeypatch, by
):
    url = secured()
    said = {"ca": str(pki / "ca.pem"), "name": "triton"}
    for name, value in said.items() if by == "variables" else ():
        monkeypatch.setenv(f"EVERGREEN_TRITON_{name.upper()}", value)
    parser = CommandParser(prog="evergreen release rollback")
    add_target_flags(parser)
    flags = [
        "--store",
        str(deployment.settings.store),
        "--repository",
        deployment.settings.repository,
        "--triton-urls",
        url,
    ]
    flags += [f"--triton-{name}={value}" for name, value in said.items()] if by == "flags" else []
    connected = [target_of(parser.parse_args(flags)).connect(url)]
    connected += [Triton(url)] if by == "variables" else []
    for triton in connected:
        assert triton.is_ready(MODEL_NAME, 1)
        triton.close()


@pytest.mark.parametrize(
    ("access", "message"),
    [
        ({"ca": "/absent"}, "/absent is not a file"),
        ({"token_file": "/absent"}, "/absent is not a file"),
        ({"name": "triton"}, "without a CA"),
        ({"ca": __file__, "key": __file__}, "expected both or neither"),
    ],
)
def test_access_that_makes_no_sense_is_refused(access, message):
    with pytest.raises(ContractError, match=message):
        TritonAccess(**access)
