"""The watchdog: probes every Triton with golden rows of what the journal calls live, and reloads what answers wrongly.

One part of the release controller (`deployment.controller`). It exists because a server's own word cannot be trusted:
with its Python stub dead, Triton (before 26.01) stays "ready" and refuses all requests. And a replica that started in
the middle of a release, unseen by it, goes on serving what it read.

It heals under the deployment's lock and never waits for it: while a release is at work, the release decides what is
served. A release that was killed is taken back (`site.opened`), so that the configuration names again what the journal
names. A server that does not answer at all is left to its supervisor to restart, and probed again until it is back.
"""

import logging
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from evergreen.contracts.serving import QUEUE_REFUSALS
from evergreen.registry import promotion_journal
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError
from evergreen.serving.intact import golden_rows
from evergreen.serving.repository.model_repository import ModelRepository
from evergreen.serving.repository.triton_config import read_options
from evergreen.serving.servers import Triton, addresses_of, probe, wait_until_ready
from evergreen.serving.site import SiteSettings, opened

logger = logging.getLogger(__name__)

WELL = "well"
"""The right version answered the golden rows correctly."""
GONE = "gone"
"""The server does not answer at all."""
BUSY = "busy"
"""The server answers, but not this now: a full queue, or versions being switched."""
SUSPECT = "suspect"
"""A wrong answer, for the first time."""
SKIPPED = "skipped"
"""Ill, but a deployment is at work."""
HEALED = "healed"
"""It was ill, and answers correctly since it was reloaded."""
ILL = "ill"
"""Reloading it did not help."""
FINDINGS = (WELL, GONE, BUSY, SUSPECT, SKIPPED, HEALED, ILL)

_LEVELS = {
    **dict.fromkeys((WELL, BUSY, SKIPPED), logging.INFO),
    **dict.fromkeys((SUSPECT, HEALED), logging.WARNING),
    **dict.fromkeys((GONE, ILL), logging.ERROR),
}
_DEAD_STUB = "not healthy"
"""In the refusal of every request to a model whose stub died; needs no second opinion."""
_STRIKES = 2
"""Wrong or absent answers in a row before a model is reloaded; where that does not help, it is tried again at every
doubling of them: a model that is unloaded in each round answers nobody."""

_REQUESTS_PER_INSTANCE = 2
"""Requests to each of several instances. They take turns, but a thread that comes late to the queue loses its turn:
on a busy machine 2 of 300 requests met the instance of the request before (Triton 2.51, two instances)."""


@dataclass(kw_only=True)
class Watchdog:
    """Looks after the servers of one site; one call of `look` is one round."""

    site: SiteSettings
    counts: Counter[str] = field(default_factory=Counter)
    """How often each finding was made, since the start."""
    reloads: Counter[int] = field(default_factory=Counter)
    """How often a server was made to reload each version, since the start."""
    num_recovered: int = 0
    """Killed deployments that were taken back."""

    def __post_init__(self) -> None:
        # A version's number is never given to other weights, so its rows stay the same.
        self._golden = lru_cache(maxsize=4)(lambda version: golden_rows(self._repository, self.site.store, version))
        self._strikes: Counter[str] = Counter()
        self._last: dict[str, str] = {}
        self._rounds: Counter[str] = Counter()
        """Rounds in a row with the last finding."""

    @cached_property
    def _repository(self) -> ModelRepository:
        """Opened when something is live: before, the store need not know its recommender."""
        return self.site.open_repository()

    def look(self) -> dict[str, str]:
        """One finding for each model of each server, by `host:port model`; none while nothing is live.

        Raises:
            ContractError: the journal, or a version that it calls live, is damaged.
        """
        self._recover()
        findings = {}
        for url in self._addresses():
            for name, version in self._expected_versions().items():
                key = f"{url} {name}"
                finding, why = self._look_at(url, name, version)
                findings[key] = finding
                self.counts[finding] += 1
                self._rounds[key] = self._rounds[key] + 1 if finding == self._last.get(key) else 1
                self._last[key] = finding
                # A pod that ends in a rolling update is gone once, and then no address of the name any more.
                if self._rounds[key] == (_STRIKES if finding == GONE else 1):
                    logger.log(_LEVELS[finding], "triton %s, version %d: %s%s", key, version, finding, why)
        return findings

    def _addresses(self) -> list[str]:
        """host:port of each server now: replicas come and go."""
        found = [address for url in self.site.triton_urls for address in addresses_of(url, self.site.resolve)]
        return list(dict.fromkeys(found))

    def _expected_versions(self) -> dict[str, int]:
        """The version that each model must answer with, by the journal."""
        live, canary = promotion_journal.current(self.site.store), promotion_journal.canary_at_work(self.site.store)
        if live is None and canary is None:
            return {}
        names = self._repository.names
        lines = {names.model: live, names.canary: canary}
        return {name: entry.version for name, entry in lines.items() if entry is not None}

    def _recover(self) -> None:
        """Takes back a deployment that was killed; one that is at work holds the lock, and is left alone."""
        if promotion_journal.interrupted(self.site.store) is None:
            return
        patience = replace(self.site.patience, lock_seconds=0.0)
        try:
            with opened(replace(self.site, patience=patience)) as site:
                self.num_recovered += site.recovered is not None
        except TemporaryError as error:
            logger.info("the journal ends with an intent: %s", error)

    def _look_at(self, url: str, name: str, version: int) -> tuple[str, str]:
        try:
            with closing(self.site.connect(url)) as server:
                server.check_live()
                return self._judge(server, name, version)
        except (TemporaryError, PermanentError) as error:
            return GONE, f": {error}"

    def _judge(self, server: Triton, name: str, version: int) -> tuple[str, str]:
        key = f"{server.url} {name}"
        try:
            self._check_answers(server, name, version)
            del self._strikes[key]
            return WELL, ""
        except (TemporaryError, PermanentError) as error:
            why = str(error)
            if any(sign in why for sign in QUEUE_REFUSALS):
                # An overloaded server is not ill, and a reload would make it worse.
                return BUSY, f": {why}"
            self._strikes[key] += 1
            strikes, needed = self._strikes[key], 1 if _DEAD_STUB in why else _STRIKES
            if strikes < needed:
                return (BUSY if isinstance(error, TemporaryError) else SUSPECT), f": {why}"
            if strikes & (strikes - 1):
                return ILL, f": {why}; to be reloaded later"
        try:
            with self._repository.locked():
                finding, how = self._heal(server, name)
        except TemporaryError as error:
            finding, how = SKIPPED, str(error)
        if finding in (WELL, HEALED):
            del self._strikes[key]
        elif finding == SKIPPED:
            self._strikes[key] -= 1
        return finding, f": {why}; {how}"

    def _check_answers(self, server: Triton, name: str, version: int) -> None:
        """Returns if clients' requests, which name no version, are answered correctly; never by a cache.

        One instance alone may be dead, and none can be addressed, so more requests are sent than there are.
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
        """Reloads the model unless it is well meanwhile; what is live is read again, now that it cannot change."""
        version = self._expected_versions().get(name)
        if version is None or promotion_journal.interrupted(self.site.store):
            return SKIPPED, "a deployment was at work meanwhile"
        trouble = self._trouble(server, name, version)
        if trouble is None:
            return WELL, "a deployment was at work meanwhile"
        # A load alone keeps a version answering that is merely another; it does nothing for a dead stub: to the server
        # nothing has changed.
        for unload in (True,) if _DEAD_STUB in trouble else (False, True):
            if name == self._repository.names.model:  # a canary's are none of the live version
                self.reloads[version] += 1
            trouble = self._trouble(server, name, version, load=True, unload=unload)
            if trouble is None:
                return HEALED, "reloaded"
        return ILL, f"reloading it did not help: {trouble}"

    def _trouble(
        self, server: Triton, name: str, version: int, *, load: bool = False, unload: bool = False
    ) -> str | None:
        """What is wrong with the model's answer, after loading it if `load` is set; None = nothing."""
        try:
            if unload:
                server.unload(name)
            if load:
                server.load(name)
                wait_until_ready(server, name, version, patience=self.site.patience)
            self._check_answers(server, name, version)
        except (TemporaryError, PermanentError) as error:
            return str(error)
        return None
