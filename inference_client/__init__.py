"""Score rows and rank candidates by a served recommender, and log the predictions and outcomes.

These names are public:

- `RecommenderClient` and `SyncRecommenderClient`, with their results `ScoredRows`, `Ranking` and
  `PublishingCounts`.
- `Outcome`, the argument of `RecommenderClient.report`.
- `ClientSettings`, `ServerAccess` and `PublisherSettings`.
- `Unpublished`, which is raised at closing if the event log stays unavailable.
- `metrics_text` for Prometheus.
- `ContractError` (correct the input), `TemporaryError` (retry) and `PermanentError` (stop). Callers
  choose their reaction by these base classes. The module `inference_client.errors` has subclasses
  of these errors.

Names that are not in this list may change in any version.

The caller gives rows by column name. The client logs every answer, and publishes what is still
queued when the `with` block ends. An application passes the server's address, `host:port`, and the
location of its recommender's description. This example uses a local server and description instead:

    >>> import asyncio, tempfile
    >>> import numpy as np
    >>> from evergreen.config.features import Features
    >>> from evergreen.config.spec import Recommender
    >>> from inference_client import Outcome, RecommenderClient
    >>> from inference_client.scoring import Scored
    >>> class Server:
    ...     async def score(self, dense, categorical, *, request_id=None, key=None):
    ...         return Scored((dense[:, 0] / 10).astype(np.float32), 7)
    >>> shop = Recommender(name="shop", features=Features(numeric=("price",), categorical=("item", "user")))
    >>> async def serve(log):
    ...     async with RecommenderClient(Server(), recommender=shop, log=log) as client:
    ...         items = [{"item": 8, "price": 2}, {"item": 9, "price": 5}, {"item": 3, "price": 4}]
    ...         ranking = await client.rank(items, 2, context={"user": [7]}, key="user-7")
    ...         client.report(Outcome(request_id=ranking.request_id, row=0))
    ...     return ranking.candidates.tolist(), client.log_counts
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     best, counts = asyncio.run(serve(f"sqlite:///{folder}/log.db"))
    >>> best, counts.published_rows, counts.published_outcomes
    ([1, 2], 2, 1)

In code without an event loop, use `with SyncRecommenderClient("host:port", recommender=PATH,
log=URL) as client:` and `client.score(rows)`. The package also contains simulated users and the
commands in `__main__`.
"""  # noqa: E501

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError
    from inference_client.access import ServerAccess
    from inference_client.publisher import (
        Outcome,
        PublisherSettings,
        PublishingCounts,
        Unpublished,
        metrics_text,
    )
    from inference_client.recommender import (
        Ranking,
        RecommenderClient,
        ScoredRows,
        SyncRecommenderClient,
    )
    from inference_client.scoring import ClientSettings

__all__ = [
    "ClientSettings",
    "ContractError",
    "Outcome",
    "PermanentError",
    "PublisherSettings",
    "PublishingCounts",
    "Ranking",
    "RecommenderClient",
    "ScoredRows",
    "ServerAccess",
    "SyncRecommenderClient",
    "TemporaryError",
    "Unpublished",
    "metrics_text",
]

_MODULE_OF = {
    **dict.fromkeys(("ContractError", "PermanentError", "TemporaryError"), "errors"),
    **dict.fromkeys(
        ("Outcome", "PublisherSettings", "PublishingCounts", "Unpublished", "metrics_text"),
        "publisher",
    ),
    **dict.fromkeys(
        ("Ranking", "RecommenderClient", "ScoredRows", "SyncRecommenderClient"), "recommender"
    ),
    "ClientSettings": "scoring",
    "ServerAccess": "access",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use.

    gRPC and NumPy take half a second to import, and `--help` does not need them.
    """
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
