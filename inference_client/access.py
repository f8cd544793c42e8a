"""Options for TLS, and for a token that the client sends with each call.

The files have the form that Kubernetes mounts: CA certificates, a client certificate, and a token
that is renewed.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from evergreen.runtime.errors import ContractError

logger = logging.getLogger(__name__)

TOKEN_SECONDS = 30.0
"""Seconds after which the token's file is read again."""


@dataclass(frozen=True, kw_only=True)
class ServerAccess:
    """Connection options of the server.

    Raises:
        ContractError: an option is set without another option that it needs.
    """

    tls: bool = False
    """Whether to use TLS and verify the server's certificate and name."""
    ca_file: Path | None = None
    """PEM file of the CA certificates that sign the server's certificate. None = gRPC's default
    CAs."""
    certificate_file: Path | None = None
    """PEM file of the client's certificate, for mutual TLS. This setting also requires
    `key_file`."""
    key_file: Path | None = None
    """PEM file of the client certificate's private key."""
    token_file: Path | None = None
    """File with the token that is sent as `authorization: Bearer TOKEN`. The client reads the file
    again every 30 s. `tls` is required, because the token would otherwise be readable on the
    network."""

    def __post_init__(self) -> None:
        for name in ("ca_file", "certificate_file", "key_file", "token_file"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, Path(value))
        if (self.certificate_file is None) != (self.key_file is None):
            raise ContractError(
                f"certificate_file is {self.certificate_file} and key_file {self.key_file}, "
                "expected both or none"
            )
        for name in ("ca_file", "certificate_file", "token_file"):
            if getattr(self, name) is not None and not self.tls:
                raise ContractError(
                    f"{name} is {getattr(self, name)} without tls, expected tls to be True"
                )

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Return the gRPC channel credentials, or None if TLS is off.

        Raises:
            ContractError: a file cannot be read.
        """
        if not self.tls:
            return None
        files = (self.ca_file, self.key_file, self.certificate_file)
        ca, key, certificate = (None if file is None else _read(file) for file in files)
        return grpc.ssl_channel_credentials(
            root_certificates=ca, private_key=key, certificate_chain=certificate
        )


class Token:
    """Token from a file, which is read again when the token is old."""

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the token.

        Raises:
            ContractError: the file cannot be read, or contains no token.
        """
        self._path, self._clock = path, clock
        self._read_at = clock()
        self._token = None if path is None else _read_token(path)

    def headers(self) -> dict[str, Any] | None:
        """Return the headers of a call, or None if there is no token."""
        if self._path is None:
            return None
        if self._clock() - self._read_at >= TOKEN_SECONDS:
            self._read_at = self._clock()
            try:
                self._token = _read_token(self._path)
            except ContractError as error:
                logger.warning("the previous token is used: %s", error)
        return {"authorization": f"Bearer {self._token}"}


def _read_token(path: Path) -> str:
    token = _read(path).decode(errors="replace").strip()
    if not token or not token.isascii() or not token.isprintable():
        raise ContractError(
            f"{path} contains no token, expected one line of printable ASCII characters"
        )
    return token


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ContractError(f"{path} cannot be read: {error.strerror}") from error
