"""Routing of requests by the traffic plan, to the answering arm and the shadow arm.

A problem with the plan never makes a request fail. Without a plan, the stable model answers. If the
plan cannot be read, the last good plan is used. If the canary does not answer, the stable arm
answers within the same deadline. A shadow request starts after the served answer, uses a separate
connection and is not retried. A shadow request is dropped and counted if too many shadow requests
are running, or if served requests are waiting. `registry.traffic_plan` defines the plan, and
deployment evaluates the shadow scores.
"""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from evergreen.config.spec import Recommender
from evergreen.registry.traffic_plan import PLAN_POLL_SECONDS, Arm, TrafficPlan, traffic_file
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError
from evergreen.storage.objects import Objects
from evergreen.storage.uris import open_objects
from inference_client.errors import DeadlineExpired, Overloaded
from inference_client.scoring import ClientSettings, Scored, ScoringClient

logger = logging.getLogger(__name__)

_MAX_SHADOWS = 4
"""Maximum number of concurrent shadow requests."""
_SHADOW_SECONDS = 5.0
"""Maximum deadline of a shadow request. The deadline of served requests applies instead if it is
shorter."""
_FIRST_READ_SECONDS = 5.0
"""Maximum time that opening a client waits for the plan, in seconds. The stable model answers until
the plan has been read."""


def open_scorer(
    server: str,
    recommender: Recommender,
    settings: ClientSettings | None = None,
    *,
    plan_uri: str | None = None,
) -> "ScoringClient | PlannedClient":
    """Open a scorer that uses a recommender's only model, or the traffic plan at `plan_uri`.

    Raises:
        ContractError: `plan_uri` is a folder that does not exist, so no plan could ever appear in
            it.
    """
    if plan_uri is None:
        return ScoringClient(
            server, recommender.name, settings, columns=recommender.features.columns
        )
    follower = PlanFollower(open_objects(plan_uri), recommender.name)
    plan = follower.objects.local(follower.name)
    if plan is not None and not plan.parent.is_dir():
        raise ContractError(
            f"plan is {plan_uri!r}, but {plan.parent} is not a folder, expected the model "
            "repository"
        )
    return PlannedClient(server, follower, settings, columns=recommender.features.columns)


class PlanFollower:
    """Poller of a recommender's traffic plan. If a read fails, the last good plan stays.

    Reads happen in a separate daemon thread, so that unresponsive storage delays neither requests
    nor the exit of the process.
    """

    def __init__(
        self, objects: Objects, model_name: str, *, interval_seconds: float = PLAN_POLL_SECONDS
    ) -> None:
        """Store the parameters without reading the plan.

        Args:
            objects: Model repository.
            model_name: Name of the model. `traffic_file` derives the name of the plan from the
                model's name.
            interval_seconds: Seconds between two reads.
        """
        self.objects, self.model_name, self._interval = objects, model_name, interval_seconds
        self.name = traffic_file(model_name)
        self.source = f"{objects.uri}/{self.name}"
        self.current: TrafficPlan | None = None
        """Last plan that was read successfully. None if there is no plan, or if no plan was read
        yet. Without a plan, the stable model answers."""
        self.problem: str | None = None
        """Error of the last read of the plan. After a failed read, `current` may be outdated. None
        = the last read of the plan succeeded."""
        self._stopped = threading.Event()

    async def start(self) -> None:
        """Start polling. The call returns after the first read, or after `_FIRST_READ_SECONDS`."""
        loop, is_read = asyncio.get_running_loop(), asyncio.Event()

        def follow() -> None:
            self.refresh()
            # A RuntimeError here means that the event loop has ended.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(is_read.set)
            while not self._stopped.wait(self._interval):
                self.refresh()

        threading.Thread(target=follow, name="traffic plan", daemon=True).start()
        try:
            await asyncio.wait_for(is_read.wait(), _FIRST_READ_SECONDS)
        except asyncio.TimeoutError:
            logger.warning(
                "%s was not read within %g s, the stable model answers",
                self.source,
                _FIRST_READ_SECONDS,
            )

    def stop(self) -> None:
        """Stop polling, without waiting for a read in progress."""
        self._stopped.set()

    def refresh(self) -> None:
        """Read the plan once. If the read fails, `problem` is set and no error is raised."""
        try:
            stored = self.objects.read(self.name)
            plan = None if stored is None else TrafficPlan.loads(stored.content, source=self.source)
        except Exception as error:
            # Storage libraries raise many kinds of errors. The last good plan remains in use, and
            # the next read may succeed.
            if self.problem != str(error):
                logger.warning(
                    "the traffic plan stays as it is (%s): %s", _describe(self.current), error
                )
            self.problem = str(error)
            return
        if plan != self.current or self.problem is not None:
            logger.info("traffic plan: %s, was %s", _describe(plan), _describe(self.current))
        self.current, self.problem = plan, None


def _describe(plan: TrafficPlan | None) -> str:
    if plan is None:
        return "none"
    if plan.canary is None:
        return f"{plan.sequence}, version {plan.stable.version} alone"
    return (
        f"{plan.sequence}, version {plan.canary.version} answers {plan.canary_share:.1%} beside "
        f"{plan.stable.version}, shadow {plan.shadow_share:.1%}"
    )


class PlannedClient:
    """`KeyedScorer` that follows a traffic plan.

    Use the client in an `async with` block, in one event loop only.
    """

    def __init__(
        self,
        server: str,
        plan: PlanFollower,
        settings: ClientSettings | None = None,
        *,
        columns: Mapping[str, Sequence[str]] | None = None,
        max_shadows: int = _MAX_SHADOWS,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the connections.

        Args:
            server: Address, see `ScoringClient`.
            plan: Reads the traffic plan at intervals.
            settings: Deadlines and limits of requests.
            columns: Expected columns, see `ScoringClient`.
            max_shadows: Maximum number of shadow requests at the same time. Any further shadow
                request is dropped.
            timer: Monotonic clock in seconds. If the canary fails, this clock shows how much of the
                request's deadline is left for the stable arm.
        """
        self._settings = settings or ClientSettings()
        self._timer = timer
        self.plan = plan
        self._client = ScoringClient(server, plan.model_name, self._settings, columns=columns)
        deadline = min(_SHADOW_SECONDS, self._settings.deadline_seconds)
        shadow_settings = replace(
            self._settings,
            deadline_seconds=deadline,
            max_in_flight=max_shadows,
            max_waiting=0,
            max_attempts=1,
        )
        self._shadow_client = ScoringClient(
            server, plan.model_name, shadow_settings, columns=columns
        )
        self._shadows: set[asyncio.Task[Scored | None]] = set()
        self.fallbacks: Counter[str] = Counter()
        """Number of requests for the canary that the stable arm answered instead, by error."""
        self.shadow_counts: Counter[str] = Counter()
        """Number of shadow requests by result. The result is `answered`, `dropped` (never sent), or
        the name of an error."""

    async def __aenter__(self) -> "PlannedClient":
        await self.plan.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for all requests in flight, including shadow requests, and close the connections."""
        self.plan.stop()
        if self._shadows:
            await asyncio.wait(set(self._shadows))
        await self._shadow_client.close()
        await self._client.close()

    async def score(
        self,
        dense: NDArray[np.float32],
        categorical: NDArray[np.int64],
        *,
        request_id: str | None = None,
        key: str | None = None,
    ) -> Scored:
        """Score the rows by the arm to which the plan routes the key.

        `ScoringClient.score` describes rows and errors.

        Args:
            dense: Dense features [n, d].
            categorical: Categories, shape [n, slots].
            request_id: Id from which the choice of shadow requests is computed. None = a random id.
            key: User for whom the rows are scored. The same key is always routed to the same arm.
                None = the request's id.
        """
        plan = self.plan.current
        if plan is None:
            return await self._client.score(dense, categorical)
        request_id = request_id or uuid4().hex
        key = key or request_id
        arm = plan.arm_for(key)
        if arm != plan.canary:
            scored = await self._client.score(dense, categorical, model_name=plan.stable.model_name)
        else:
            scored, arm = await self._call_canary(
                plan, canary=arm, dense=dense, categorical=categorical
            )
        shadow = plan.shadow_for(key, request_id)
        if shadow is None or shadow == arm:
            return scored
        if self._client.has_line or self._shadow_client.is_full:
            self.shadow_counts["dropped"] += 1
            return scored
        task = asyncio.get_running_loop().create_task(self._call_shadow(shadow, dense, categorical))
        self._shadows.add(task)
        task.add_done_callback(self._shadows.discard)
        return scored._replace(shadow=task)

    async def _call_canary(
        self,
        plan: TrafficPlan,
        *,
        canary: Arm,
        dense: NDArray[np.float32],
        categorical: NDArray[np.int64],
    ) -> tuple[Scored, Arm]:
        """Call the canary. If the canary fails, call the stable arm.

        Returns the scores, and the arm that computed them.
        """
        give_up_at = self._timer() + self._settings.deadline_seconds
        try:
            scored = await self._client.score(
                dense, categorical, model_name=canary.model_name, max_attempts=1
            )
            return scored._replace(canary=True), canary
        except (DeadlineExpired, Overloaded):
            # A second call to the stable arm would fail too: the time is up, or the client has no
            # free slot.
            raise
        except (TemporaryError, PermanentError, ContractError) as error:
            # An error of the canary must not reach the user. An invalid request will also fail on
            # the stable arm.
            self.fallbacks[type(error).__name__] += 1
            logger.debug("the canary did not answer, calling %s: %s", plan.stable.model_name, error)
        left = max(0.001, give_up_at - self._timer())
        name = plan.stable.model_name
        return await self._client.score(
            dense, categorical, model_name=name, deadline_seconds=left
        ), plan.stable

    async def _call_shadow(
        self, arm: Arm, dense: NDArray[np.float32], categorical: NDArray[np.int64]
    ) -> Scored | None:
        try:
            answer = await self._shadow_client.score(dense, categorical, model_name=arm.model_name)
        except (TemporaryError, PermanentError, ContractError) as error:
            self.shadow_counts[
                "dropped" if isinstance(error, Overloaded) else type(error).__name__
            ] += 1
            logger.debug("shadow request failed: %s", error)
            return None
        self.shadow_counts["answered"] += 1
        return answer
