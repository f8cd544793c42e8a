"""Registry that rejects request ids which this client logged recently.

The event log joins clicks to rows by request id. If a session's id were used for two requests, a
click on the second request would be attributed to the first request.
"""

from collections import OrderedDict

from evergreen.runtime.errors import ContractError

REMEMBERED_IDS = 100_000
"""Number of newest request ids that a client remembers. The ids take about 25 MB of memory. The
monitor detects later duplicates and duplicates of other clients
(`records_total{outcome="reused_id"}`)."""


class RequestIds:
    """Request ids that this client has used recently. Use it in one event loop."""

    def __init__(self, remembered: int = REMEMBERED_IDS) -> None:
        self._remembered = remembered
        self._taken: OrderedDict[str, None] = OrderedDict()

    def take(self, request_id: str) -> None:
        """Reserve the id of a request that will be logged.

        Raises:
            ContractError: a recent request has the same id.
        """
        if request_id in self._taken:
            raise ContractError(
                f"request_id {request_id!r} was used by an earlier request of this client, "
                "expected a new one for "
                "each request, because clicks are joined by it"
            )
        self._taken[request_id] = None
        if len(self._taken) > self._remembered:
            self._taken.popitem(last=False)

    def give_back(self, request_id: str) -> None:
        """Release the id of a request that has failed without being logged."""
        self._taken.pop(request_id, None)
