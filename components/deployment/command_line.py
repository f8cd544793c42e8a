"""What the commands that change what is served have in common: where they work, for whom, and their exit codes.

Where they work is `<store>/serving.json`, as the last release left it, so that a person on call names the store and the
reason and nothing else; flags come first.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable

from components.deployment.discovery import parse_urls
from components.deployment.release_checks import Refused
from components.deployment.site import SiteSettings
from components.runtime.errors import ContractError, PermanentError, TemporaryError
from components.runtime.people import whoami
from components.storage.uris import typed_folder, typed_uri
from components.store.models import read_serving_place


def add_site_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that say where, and for whom."""
    parser.add_argument("--store", required=True, help="model store, folder or its URI")
    parser.add_argument(
        "--repository",
        type=typed_uri,
        help="Triton's model repository, folder or gs:// URI; default: where the last release went",
    )
    parser.add_argument(
        "--triton-urls",
        help="host:grpc_port or dns:///name:grpc_port of the running servers, comma-separated; empty = none; "
        "default: those of the last release",
    )
    parser.add_argument("--who", default="", help="who asks, for the journal; default: user@host")


def site_of(arguments: argparse.Namespace) -> SiteSettings:
    """The place that the flags mean.

    Raises:
        ContractError: there is no such store, or it does not know where releases go and no flag says it.
    """
    store = typed_folder(arguments.store, "--store")
    place = read_serving_place(store)
    repository = arguments.repository or (place.repository_uri if place else None)
    if repository is None:
        raise ContractError(
            f"{store / 'serving.json'} is absent (no release yet, or an older one), expected --repository"
        )
    urls = arguments.triton_urls
    if urls is None:
        if place is None:
            raise ContractError(f"{store / 'serving.json'} is absent, expected --triton-urls (empty = no server runs)")
        urls = ",".join(place.triton_urls)
    return SiteSettings(
        store=store,
        repository=repository,
        triton_urls=tuple(parse_urls(urls)),
        who=arguments.who or whoami(),
    )


def reason(text: str) -> str:
    """What a person gives as the reason of a change: the journal keeps it for good, so it may not be empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty, expected why, for the journal")
    return text


def exit_code(command: Callable[[], str]) -> int:
    """Prints what the command answers; the exit code.

    0 done, 2 misuse or impossible as things are, 3 a server, a disk or another deployment was in the way and what was
    live is live: the same command may succeed later.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        print(command())
    except (ContractError, Refused) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (TemporaryError, PermanentError, OSError) as error:
        print(f"error: {error}; version in the journal stays live", file=sys.stderr)
        return 3
    return 0
