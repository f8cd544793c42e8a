"""What the gate measured of a version before it served: its AUC with interval, from the model store's verdict.

The path is version -> release -> model -> last verdict. Comparing with it is left to `monitoring.deciding.policies`;
remembering it, so that a later verdict on the same model changes no decision, to `monitoring.deciding.judging`.
"""

from __future__ import annotations

import logging
from pathlib import Path

from components.contracts.manifests import Release, Verdict
from components.runtime.errors import ContractError
from components.store.models import release_path, verdict_paths
from monitoring.deciding.policy import Baseline

logger = logging.getLogger(__name__)


class GateBaselines:
    """Baselines of the versions in a model store."""

    def __init__(self, store: Path) -> None:
        """Reads the model store in the folder `store`."""
        self._store = store

    def __call__(self, version: int) -> Baseline | None:
        """The gate's AUC of `version`; None where there is no release, no verdict, or the gate had no AUC.

        A file that cannot be read counts as absent and is logged: judging continues without a baseline.
        """
        release, verdict = release_path(self._store, version), None
        try:
            if release.exists():
                path, _ = verdict_paths(self._store, Release.read(release).model_id)
                verdict = Verdict.read(path) if path.exists() else None
        except (ContractError, OSError) as error:
            logger.warning("no baseline of version %d: %s", version, error)
        if verdict is None:
            return None
        gate = verdict.candidate
        if gate.auc is None or gate.auc_low is None or gate.auc_high is None:
            return None
        return Baseline(auc=gate.auc, low=gate.auc_low, high=gate.auc_high)
