"""What lies at a lake's URI: objects below it, or the one object that it names."""

from __future__ import annotations

import logging
from collections.abc import Callable

from components.runtime.errors import ContractError
from components.storage.objects import ObjectInfo, Objects

logger = logging.getLogger(__name__)


def find_objects(uri: str, open_storage: Callable[[str], Objects]) -> tuple[Objects, list[ObjectInfo], str | None]:
    """The objects below `uri`; where it is an object itself, those beside it, it alone, and its name.

    Raises:
        ContractError: there is neither.
    """
    objects = open_storage(uri)
    folder, _, name = uri.rpartition("/")
    if found := objects.list():
        return objects, _told(uri, found), None
    if folder.count("/") > 1:
        beside = open_storage(folder)
        return beside, list_objects(beside, uri, name), name
    return objects, _told(uri, found), None


def list_objects(objects: Objects, uri: str, file: str | None) -> list[ObjectInfo]:
    """What `objects` hold; where `file` is given, it alone.

    Raises:
        ContractError: nothing; the message names the lake, `uri`.
    """
    return _told(uri, [each for each in objects.list(file or "") if file in (None, each.name)])


def _told(uri: str, listing: list[ObjectInfo]) -> list[ObjectInfo]:
    if not listing:
        raise ContractError(f"lake {uri} holds no object, expected day partitions or Criteo files")
    logger.info("%s: %d objects, %.1f MB in all", uri, len(listing), sum(each.size for each in listing) / 1e6)
    return listing
