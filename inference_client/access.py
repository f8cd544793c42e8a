"""How a server lets the client in: TLS, and a token that each call carries.

Files are those that Kubernetes mounts: authorities, a certificate of the client's own, a token that is renewed.
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
"""How old a token may be before its file is read again."""


@dataclass(frozen=True, kw_only=True)
class ServerAccess:
    """How to speak to the server.

    Raises:
        ContractError: A file is given that has no use without another setting.
    """

    tls: bool = False
    """Whether the connection is encrypted, and the server's certificate checked against the server's name."""
    ca_file: Path | None = None
    """PEM of the authorities that may have signed it; None = those that gRPC brings along."""
    certificate_file: Path | None = None
    """PEM of the client's own certificate, for a server that asks for one; with `key_file`."""
    key_file: Path | None = None
    """PEM of its key."""
    token_file: Path | None = None
    """File with a token, which goes as `authorization: Bearer TOKEN` with each call. It is read again every 30 s. Only
    with `tls`: else everybody on the way could read it."""

    def __post_init__(self) -> None:
        for name in ("ca_file", "certificate_file", "key_file", "token_file"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, Path(value))
        if (self.certificate_file is None) != (self.key_file is None):
            raise ContractError(
                f"certificate_file is {self.certificate_file} and key_file {self.key_file}, expected both or none"
            )
        for name in ("ca_file", "certificate_file", "token_file"):
            if getattr(self, name) is not None and not self.tls:
                raise ContractError(f"{name} is {getattr(self, name)} without tls, expected tls with it")

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Return what a channel is opened with; None without TLS.

        Raises:
            ContractError: A file cannot be read.
        """
        if not self.tls:
            return None
        files = (self.ca_file, self.key_file, self.certificate_file)
        ca, key, certificate = (None if file is None else _read(file) for file in files)
        return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=certificate)


class Token:
    """The token of a file, as it is now or was read last."""

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the token.

        Raises:
            ContractError: The file cannot be read, or holds no token.
        """
        self._path, self._clock = path, clock
        self._read_at = clock()
        self._token = None if path is None else _read_token(path)

    def headers(self) -> dict[str, Any] | None:
        """Return what each call carries; None without a token."""
        if self._path is None:
            return None
        if self._clock() - self._read_at >= TOKEN_SECONDS:
            self._read_at = self._clock()
            try:
                self._token = _read_token(self._path)
            except ContractError as error:
                logger.warning("the token of before is used: %s", error)
        return {"authorization": f"Bearer {self._token}"}


def _read_token(path: Path) -> str:
    token = _read(path).decode(errors="replace").strip()
    if not token or not token.isascii() or not token.isprintable():
        raise ContractError(f"{path} holds no token, expected one line of printable ASCII characters")
    return token


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ContractError(f"{path} cannot be read: {error.strerror}") from error
