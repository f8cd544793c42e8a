"""Read released versions from the model registry: gate AUC, training rows, statistics.

A version identifies its release, and the release identifies its model. The registry has the last
verdict, the manifest and the training profile of each model. A file that cannot be read is logged
and counts as missing, so that neither decisions nor the archive stop.
`monitoring.policies.evaluation` remembers baselines, so that a later verdict on the same model
changes no decision.
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
    """Released versions in a model registry."""

    def __init__(self, store: Path) -> None:
        self._store = store

    def baseline(self, version: int) -> Baseline | None:
        """Return the gate AUC and the training end of `version`, or None if it was not released."""
        try:
            if (release := self._release(version)) is None:
                return None
        except (ContractError, OSError) as error:
            logger.warning("the baseline of version %d is unknown: %s", version, error)
            return None
        gate = self._gate(release) or ModelQuality()
        is_measured = None not in (gate.auc, gate.auc_low, gate.auc_high)
        return Baseline(
            auc=gate.auc if is_measured else None,
            low=gate.auc_low if is_measured else None,
            high=gate.auc_high if is_measured else None,
            previous_version=release.previous_version,
            trained_until=self._trained_until(release),
        )

    def _gate(self, release: Release) -> ModelQuality | None:
        """Return the model quality in the last verdict, or None."""
        path = verdict_paths(self._store, release.model_id)[0]
        try:
            return Verdict.read(path).candidate if path.exists() else None
        except (ContractError, OSError) as error:
            logger.warning("the baseline of version %d is unknown: %s", release.version, error)
            return None

    def _trained_until(self, release: Release) -> float | None:
        """Return the event time of the model's newest training row, or None if it is unknown."""
        path = model_folder(self._store, release.model_id) / Model.MANIFEST
        try:
            return moment_of(Model.read(path).watermark).timestamp()
        except (ContractError, OSError, ValueError) as error:
            logger.warning(
                "the training rows of model version %d are unknown: %s", release.version, error
            )
            return None

    def versions(self) -> frozenset[int]:
        """Return the versions in the promotion journal.

        The set is empty while the journal cannot be read.
        """
        try:
            return frozenset(each.version for each in read_entries(self._store))
        except ContractError as error:
            logger.warning("the released versions are unknown: %s", error)
            return frozenset()

    def reference(self, version: int) -> TrainingReference | None:
        """Return the training profile of `version`, or None if it has no release or no profile."""
        try:
            if (release := self._release(version)) is None:
                return None
            path = model_folder(self._store, release.model_id) / Model.REFERENCE
            return (
                read_reference(path, scores=scores_path(self._store, release.model_id))
                if path.exists()
                else None
            )
        except (ContractError, OSError) as error:
            logger.warning("drift of model version %d is not measured: %s", version, error)
            return None

    def _release(self, version: int) -> Release | None:
        path = release_path(self._store, version)
        return Release.read(path) if path.exists() else None
