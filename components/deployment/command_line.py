"""What the commands that change what is served have in common: where they work, and for whom.

Where they work is `<store>/serving.json`, as the last release left it, so that a person on call names the store and the
reason and nothing else.
"""

import argparse
import logging

from components.deployment.servers import parse_urls
from components.deployment.site import SiteSettings
from components.runtime.errors import ContractError
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
    """The place that the flags mean; also sets up the log of a command that changes what is served.

    Raises:
        ContractError: there is no such store, or neither the store nor a flag names where releases go.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    store = typed_folder(arguments.store, "--store")
    place = read_serving_place(store)
    if place is None and (arguments.repository is None or arguments.triton_urls is None):
        raise ContractError(
            f"{store / 'serving.json'} is absent (no release yet), expected --repository and --triton-urls "
            "(empty = no server runs)"
        )
    urls = arguments.triton_urls
    return SiteSettings(
        store=store,
        repository=arguments.repository or (place.repository_uri if place else ""),
        triton_urls=parse_urls(urls) if urls is not None else tuple(place.triton_urls if place else ()),
        who=arguments.who or whoami(),
    )


def change_reason(text: str) -> str:
    """What a person gives as the reason of a change: the journal keeps it for good, so it may not be empty.

    >>> change_reason("AUC fell after version 12")
    'AUC fell after version 12'
    """
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty, expected why, for the journal")
    return text
