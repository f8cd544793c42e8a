"""The ids of the requests that a client logged lately: one id names one request.

The log joins clicks to rows by the request's id. With one id for two requests, such as a session's, a click on a row of
the second would be learned as one on the first.
"""

from collections import OrderedDict

from evergreen.runtime.errors import ContractError

REMEMBERED_IDS = 100_000
"""Newest requests whose ids a client remembers, in about 25 MB. The monitor recognizes an id that comes again later,
or from another client (`records_total{outcome="reused_id"}`)."""


class RequestIds:
    """Hands each request id to one request; use in one event loop."""

    def __init__(self, remembered: int = REMEMBERED_IDS) -> None:
        self._remembered = remembered
        self._taken: OrderedDict[str, None] = OrderedDict()

    def take(self, request_id: str) -> None:
        """Reserve the id for a request that is to be logged.

        Raises:
            ContractError: Another of the newest requests has it.
        """
        if request_id in self._taken:
            raise ContractError(
                f"request_id {request_id!r} names a request that this client logged before, expected a new one for "
                "each request: clicks are joined by it"
            )
        self._taken[request_id] = None
        if len(self._taken) > self._remembered:
            self._taken.popitem(last=False)

    def give_back(self, request_id: str) -> None:
        """Let the id be taken again: its request failed and left no record."""
        self._taken.pop(request_id, None)
