"""What the model store knows of a served version: the gate's AUC, and the statistics of its training rows.

The path is version -> release -> model -> last verdict, or reference statistics. A file that cannot be read is logged
and counts as absent: neither judging nor archiving stops for it. Remembering a baseline, so that a later verdict on the
same model changes no decision, is left to `monitoring.deciding.judging`.
"""

import logging
from pathlib import Path

from components.contracts.manifests import Model, Release, Verdict
from components.contracts.reference_statistics import ReferenceStatistics, read_reference
from components.runtime.errors import ContractError
from components.store.models import model_folder, release_path, scores_path, verdict_paths
from components.store.promotion_journal import read_entries
from monitoring.deciding.policy import Baseline

logger = logging.getLogger(__name__)


class ReleasedModels:
    """The released versions in a model store."""

    def __init__(self, store: Path) -> None:
        self._store = store

    def baseline(self, version: int) -> Baseline | None:
        """What the gate measured of `version`; None where there is no release, no verdict, or the gate had no AUC."""
        try:
            release = self._release(version)
            path = None if release is None else verdict_paths(self._store, release.model_id)[0]
            gate = Verdict.read(path).candidate if path is not None and path.exists() else None
        except (ContractError, OSError) as error:
            logger.warning("no baseline of version %d: %s", version, error)
            return None
        if release is None or gate is None or gate.auc is None or gate.auc_low is None or gate.auc_high is None:
            return None
        before = release.previous_version
        return Baseline(auc=gate.auc, low=gate.auc_low, high=gate.auc_high, previous_version=before)

    def versions(self) -> frozenset[int]:
        """Return the versions that the promotion journal names; none while it cannot be read."""
        try:
            return frozenset(each.version for each in read_entries(self._store))
        except ContractError as error:
            logger.warning("the released versions are unknown: %s", error)
            return frozenset()

    def reference(self, version: int) -> ReferenceStatistics | None:
        """The training statistics of `version`; None where it was never released here, or has none."""
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
