"""What the model store knows of a served version: the gate's AUC, the rows that it has learned, and their statistics.

The path is version -> release -> model -> last verdict, manifest, or training profile. A file that cannot be read
is logged and counts as absent: neither judging nor archiving stops for it. Remembering a baseline, so that a later
verdict on the same model changes no decision, is left to `monitoring.policies.judging`.
"""

import logging
from pathlib import Path

from evergreen.contracts.manifests import Model, ModelQuality, Release, Verdict
from evergreen.registry.models import model_folder, release_path, scores_path, verdict_paths
from evergreen.registry.promotion_journal import moment_of, read_entries
from evergreen.runtime.errors import ContractError
from evergreen.statistics.reference import TrainingReference, read_reference
from monitoring.policies.policy import Baseline

logger = logging.getLogger(__name__)


class ReleasedModels:
    """The released versions in a model store."""

    def __init__(self, store: Path) -> None:
        self._store = store

    def baseline(self, version: int) -> Baseline | None:
        """What is known of `version`: the gate's AUC, and what it has learned; None where there is no release."""
        try:
            if (release := self._release(version)) is None:
                return None
        except (ContractError, OSError) as error:
            logger.warning("no baseline of version %d: %s", version, error)
            return None
        gate = self._gate(release) or ModelQuality()
        is_measured = None not in (gate.auc, gate.auc_low, gate.auc_high)
        return Baseline(
            auc=gate.auc if is_measured else None,
            low=gate.auc_low if is_measured else None,
            high=gate.auc_high if is_measured else None,
            previous_version=release.previous_version,
            learned_until=self._learned_until(release),
        )

    def _gate(self, release: Release) -> ModelQuality | None:
        """What the last verdict says of the model; None where there is none."""
        path = verdict_paths(self._store, release.model_id)[0]
        try:
            return Verdict.read(path).candidate if path.exists() else None
        except (ContractError, OSError) as error:
            logger.warning("no baseline of version %d: %s", release.version, error)
            return None

    def _learned_until(self, release: Release) -> float | None:
        """Event time of the newest row that the model has learned; None if its manifest cannot say."""
        path = model_folder(self._store, release.model_id) / Model.MANIFEST
        try:
            return moment_of(Model.read(path).last_learned_time).timestamp()
        except (ContractError, OSError, ValueError) as error:
            logger.warning("what model version %d has learned is not known: %s", release.version, error)
            return None

    def versions(self) -> frozenset[int]:
        """Return the versions that the promotion journal names; none while it cannot be read."""
        try:
            return frozenset(each.version for each in read_entries(self._store))
        except ContractError as error:
            logger.warning("the released versions are unknown: %s", error)
            return frozenset()

    def reference(self, version: int) -> TrainingReference | None:
        """The training profile of `version`; None where it was never released here, or has none."""
        try:
            if (release := self._release(version)) is None:
                return None
            path = model_folder(self._store, release.model_id) / Model.REFERENCE
            return read_reference(path, scores=scores_path(self._store, release.model_id)) if path.exists() else None
        except (ContractError, OSError) as error:
            logger.warning("no drift is measured of model version %d: %s", version, error)
            return None

    def _release(self, version: int) -> Release | None:
        path = release_path(self._store, version)
        return Release.read(path) if path.exists() else None
