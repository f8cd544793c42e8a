"""A client for fault campaigns: `python -m tests.support.campaign_client LOG FILE NUMBER`.

The client requests scores and reports clicks until SIGTERM. Requests are sent in groups. Before
each group, the client writes a line `requested` to FILE, with the number of rows and the clicked
row of each request id. After the log has stored the group and its clicks, the client writes a line
`sent`. The score of a row is the value of its first feature.
"""

import asyncio
import json
import os
import signal
import sys
from itertools import count

import numpy as np

from evergreen.contracts.criteo import CRITEO_RECOMMENDER
from inference_client.publisher import Outcome
from inference_client.recommender import RecommenderClient
from inference_client.rows import FeatureRows
from inference_client.scoring import Scored

REQUESTS = 25


class FirstValue:
    """A model that returns a row's first value."""

    async def score(self, dense, categorical, *, request_id=None, key=None) -> Scored:
        return Scored(dense[:, 0].copy(), 1)


async def serve(log: str, record: int, number: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    random = np.random.default_rng(int(number))

    def write_line(**fields) -> None:
        os.write(record, (json.dumps(fields) + "\n").encode())

    async with RecommenderClient(FirstValue(), recommender=CRITEO_RECOMMENDER, log=log) as client:
        for turn in count():
            if stop.is_set():
                return
            requested = {}
            for each in range(REQUESTS):
                num_rows = int(random.integers(1, 5))
                clicked = int(random.integers(num_rows)) if random.random() < 0.3 else None
                requested[f"client {number}, request {turn}-{each}"] = (num_rows, clicked)
            write_line(requested=requested)
            for name, (num_rows, clicked) in requested.items():
                rows = FeatureRows(
                    dense=random.random((num_rows, 13), np.float32),
                    categorical=random.integers(0, 2**32, (num_rows, 26)),
                )
                scored = await client.score(rows, request_id=name)
                assert scored.logged
                if clicked is not None:
                    assert client.report(Outcome(request_id=name, row=clicked))
            while client.log_counts.queued_rows or client.log_counts.queued_outcomes:
                await asyncio.sleep(0.02)
            assert (client.log_counts.dropped_rows, client.log_counts.dropped_outcomes) == (0, 0)
            write_line(sent=list(requested))


if __name__ == "__main__":
    file = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    asyncio.run(serve(sys.argv[1], file, sys.argv[3]))
