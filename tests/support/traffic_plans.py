"""A traffic plan and a client that follows it, for tests."""

import asyncio
import time

from evergreen.registry.traffic_plan import Arm, TrafficPlan
from inference_client.routing import PlanFollower, PlannedClient
from inference_client.scoring import ClientSettings
from testing.served_names import CANARY_NAME, MODEL_NAME

STABLE, CANARY = Arm(model_name=MODEL_NAME, version=3), Arm(model_name=CANARY_NAME, version=4)
KEYS = [f"user-{i}" for i in range(60)]


def make_plan(sequence=1, *, canary=CANARY, share=0.5, shadow=0.0):
    return TrafficPlan(
        sequence=sequence,
        stable=STABLE,
        canary=canary,
        canary_share=share if canary else 0.0,
        shadow_share=shadow if canary else 0.0,
        salt="salt",
        published_at="2026-03-01T00:00:00+00:00",
        reason="test",
    )


def follow(server, objects, use_client, *, interval=3600.0, max_shadows=4, **settings):
    """Call the coroutine `use_client` with a client that follows the plan, and return its result.

    The client reads the plan at the start, and then every `interval` seconds.
    """

    async def run():
        plan = PlanFollower(objects, MODEL_NAME, interval_seconds=interval)
        client = PlannedClient(
            server.url, plan, ClientSettings(**settings), max_shadows=max_shadows
        )
        async with client:
            return await use_client(client)

    return asyncio.run(run())


async def until(condition):
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "the condition was not met within 120 s"
        await asyncio.sleep(0.005)
