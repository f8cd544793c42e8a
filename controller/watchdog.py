"""Probe every Triton with golden rows of the live version, and reload models that answer wrongly.

The watchdog is part of the release controller (`controller`). Triton's own readiness is not
sufficient. With a dead Python stub, Triton (before 26.01) stays "ready" and rejects all requests. A
replica that started unnoticed during a release may keep serving an old configuration until the
watchdog repairs it.

The watchdog reloads models under the controller's lock and never waits for the lock. While a change
is in progress, the change decides what is served. The release protocol (`controller.protocol`)
decides whether a reload is allowed. The reload is implemented here and not in `controller.moves`,
because it repairs only the server that was just probed, writes nothing, and returns a finding. A
server that does not answer at all is not repaired here, because its supervisor restarts it. The
watchdog probes such a server again in each round.
"""

import logging
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from controller.deployment_target import TargetSettings, opened
from controller.protocol import HEAL, LOAD_CANARY, UNKNOWN, Server, next_rule
from controller.reconcile import observe
from evergreen.contracts.serving import QUEUE_REFUSALS
from evergreen.registry import promotion_journal
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError
from evergreen.serving.intact import golden_rows
from evergreen.serving.repository.model_repository import ModelRepository
from evergreen.serving.repository.triton_config import read_options
from evergreen.serving.servers import Triton, addresses_of, probe, wait_until_ready

logger = logging.getLogger(__name__)

HEALTHY = "healthy"
"""Finding: the expected version answered the golden rows correctly."""
UNREACHABLE = "unreachable"
"""The server does not answer at all."""
BUSY = "busy"
"""The server is live but cannot answer now: its queue is full, or it is switching versions."""
SUSPECT = "suspect"
"""First wrong answer."""
SKIPPED = "skipped"
"""The model answers wrongly, but is not reloaded now, because a deployment is running."""
HEALED = "healed"
"""Finding: the model answered wrongly, but answers correctly after a reload."""
UNHEALTHY = "unhealthy"
"""The model still answers wrongly after a reload."""
UNPROBED = "unprobed"
"""The model cannot be probed, because no copy of the version's golden rows is intact."""
FINDINGS = (HEALTHY, UNREACHABLE, BUSY, SUSPECT, SKIPPED, HEALED, UNHEALTHY, UNPROBED)

_LEVELS = {
    **dict.fromkeys((HEALTHY, BUSY, SKIPPED), logging.INFO),
    **dict.fromkeys((SUSPECT, HEALED), logging.WARNING),
    **dict.fromkeys((UNREACHABLE, UNHEALTHY, UNPROBED), logging.ERROR),
}
_DEAD_STUB = "not healthy"
"""Text in the error message of every request to a model whose stub died. The watchdog reloads a
model with this error at once."""
_FAILED_PROBES = 2
"""Consecutive failed probes before a model is reloaded. If a reload does not help, twice as many
failed probes must follow before the next reload. Without this wait, a faulty model could be
unloaded in every round, and would then serve no client."""

_REQUESTS_PER_INSTANCE = 2
"""Number of probe requests per instance if there are several instances. Triton usually alternates
between the instances. On a busy machine with two instances, 2 of 300 requests went to the same
instance as the previous request (Triton 2.51)."""


@dataclass(kw_only=True)
class Watchdog:
    """Watchdog of one target's servers. Call `check` once a round."""

    target: TargetSettings
    counts: Counter[str] = field(default_factory=Counter)
    """How often each finding occurred since the start."""
    reloads: Counter[int] = field(default_factory=Counter)
    """Number of reloads of each version since the start."""

    def __post_init__(self) -> None:
        # A version number is never reused for other weights, so its golden rows never change.
        self._golden = lru_cache(maxsize=4)(
            lambda version: golden_rows(self._repository, self.target.store, version)
        )
        self._failed_probes: Counter[str] = Counter()
        self._last: dict[str, str] = {}
        self._rounds: Counter[str] = Counter()
        """Number of consecutive rounds with the last finding."""

    @cached_property
    def _repository(self) -> ModelRepository:
        """Return the model repository.

        It is opened late, because the registry may have no recommender before the first release.
        """
        return self.target.open_repository()

    def check(self) -> dict[str, str]:
        """Probe every model on every server, and return the findings by `host:port model`.

        The result is empty if no version is live.

        Raises:
            ContractError: the journal is corrupt.
        """
        findings = {}
        for url in self._addresses():
            finding, why = HEALTHY, ""
            for name, version in self._expected_versions().items():
                key = f"{url} {name}"
                # A server that does not answer costs the full timeout, so it is probed only once.
                if finding != UNREACHABLE:
                    finding, why = self._check_model(url, name, version)
                findings[key] = finding
                self.counts[finding] += 1
                self._rounds[key] = self._rounds[key] + 1 if finding == self._last.get(key) else 1
                self._last[key] = finding
                # During a rolling update, a stopped pod fails this probe until its address
                # disappears from the list.
                if self._rounds[key] == (_FAILED_PROBES if finding == UNREACHABLE else 1):
                    logger.log(
                        _LEVELS[finding], "triton %s, version %d: %s%s", key, version, finding, why
                    )
        return findings

    def _addresses(self) -> list[str]:
        """Return the current host:port of each server."""
        found = [
            address
            for url in self.target.triton_urls
            for address in addresses_of(url, self.target.resolve)
        ]
        return list(dict.fromkeys(found))

    def _expected_versions(self) -> dict[str, int]:
        """Return the version of each model according to the journal."""
        live, canary = (
            promotion_journal.current(self.target.store),
            promotion_journal.canary_at_work(self.target.store),
        )
        if live is None and canary is None:
            return {}
        names = self._repository.names
        lines = {names.model: live, names.canary: canary}
        return {name: entry.version for name, entry in lines.items() if entry is not None}

    def _check_model(self, url: str, name: str, version: int) -> tuple[str, str]:
        try:
            with closing(self.target.connect(url)) as server:
                server.check_live()
                return self._evaluate(server, name, version)
        except (TemporaryError, PermanentError) as error:
            return UNREACHABLE, f": {error}"
        except ContractError as error:  # the other models and servers are still probed
            return UNPROBED, f": {error}"

    def _evaluate(self, server: Triton, name: str, version: int) -> tuple[str, str]:
        key = f"{server.url} {name}"
        try:
            self._check_answers(server, name, version)
            del self._failed_probes[key]
            return HEALTHY, ""
        except (TemporaryError, PermanentError) as error:
            why = str(error)
            if any(sign in why for sign in QUEUE_REFUSALS):
                # A reload would make an overloaded server worse.
                return BUSY, f": {why}"
            self._failed_probes[key] += 1
            failures, needed = self._failed_probes[key], 1 if _DEAD_STUB in why else _FAILED_PROBES
            if failures < needed:
                return (BUSY if isinstance(error, TemporaryError) else SUSPECT), f": {why}"
            if failures & (failures - 1):
                return UNHEALTHY, f": {why}; it is reloaded later"
        try:
            with self._repository.locked():
                finding, how = self._heal(server, name)
        except TemporaryError as error:
            finding, how = SKIPPED, str(error)
        if finding in (HEALTHY, HEALED):
            del self._failed_probes[key]
        elif finding == SKIPPED:
            self._failed_probes[key] -= 1
        return finding, f": {why}; {how}"

    def _check_answers(self, server: Triton, name: str, version: int) -> None:
        """Check that the model answers correctly if a request names no version.

        Rows are shuffled to avoid responses from a cache. A single instance can be dead, and a
        request cannot choose its instance, so more requests are sent than there are instances.
        """
        config = self._repository.read_config()
        try:
            instances = read_options(config).instances if config else 1
        except ContractError as error:
            logger.error("%s: %s", self._repository.uri, error)
            instances = 1
        for _ in range(_REQUESTS_PER_INSTANCE * instances if instances > 1 else 1):
            probe(server, name, version=version, golden=self._golden(version), named=False)

    def _heal(self, server: Triton, name: str) -> tuple[str, str]:
        """Reload the model if it still answers wrongly. The caller holds the lock."""
        version = self._expected_versions().get(name)
        if version is None or not self._may_reload(name):
            return SKIPPED, "a change is in progress"
        fault = self._find_fault(server, name, version)
        if fault is None:
            return HEALTHY, "a change ran meanwhile"
        # A load alone fixes a wrong version without interrupting the service. A dead stub must be
        # unloaded first, because a load has no effect if Triton sees no change.
        for unload in (True,) if _DEAD_STUB in fault else (False, True):
            if name == self._repository.names.model:  # only reloads of the live version are counted
                self.reloads[version] += 1
            fault = self._find_fault(server, name, version, load=True, unload=unload)
            if fault is None:
                return HEALED, "reloaded"
        return UNHEALTHY, f"reloading it did not help: {fault}"

    def _may_reload(self, name: str) -> bool:
        """Return whether the protocol's next move reloads the model if its answers are wrong."""
        with opened(self._settings) as target:
            desired, observed, _ = observe(target)
        is_live = name == self._repository.names.model
        wrong = (
            Server(serves=UNKNOWN, canary=desired.canary)
            if is_live
            else Server(serves=desired.live, canary=UNKNOWN)
        )
        observed = replace(observed, servers=(wrong,))
        rule = next_rule(desired, observed)
        if rule is None or rule.move != (HEAL if is_live else LOAD_CANARY):
            return False
        self.target.trace(rule, desired, observed)
        return True

    @property
    def _settings(self) -> TargetSettings:
        """Return the target's settings, with the repository that this process holds."""
        return replace(self.target, held=self._repository)

    def _find_fault(
        self, server: Triton, name: str, version: int, *, load: bool = False, unload: bool = False
    ) -> str | None:
        """Return what is wrong with the model's answers, or None.

        If `unload` or `load` is True, the model is unloaded or loaded before the probe.
        """
        try:
            if unload:
                server.unload(name)
            if load:
                server.load(name)
                wait_until_ready(server, name, version, timeouts=self.target.timeouts)
            self._check_answers(server, name, version)
        except (TemporaryError, PermanentError) as error:
            return str(error)
        return None
