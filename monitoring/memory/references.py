"""Finds the training statistics of a served version in the model store."""

from __future__ import annotations

import logging
from pathlib import Path

from components.contracts.manifests import Model, Release
from components.contracts.reference_statistics import ReferenceStatistics, read_reference
from components.runtime.errors import ContractError
from components.store.models import model_folder, release_path, scores_path

logger = logging.getLogger(__name__)


class StoredReferences:
    """The statistics of every released version of one store; read each time, 0.25 MB."""

    def __init__(self, store: Path) -> None:
        """Reads from the model store `store`."""
        self._store = store

    def __call__(self, version: int) -> ReferenceStatistics | None:
        """The statistics of `version`; None where it was never released here, or its model is older than the file.

        A file that cannot be read is logged and counts as absent: it must not stop the archive.
        """
        path = release_path(self._store, version)
        if not path.exists():
            return None
        try:
            model_id = Release.read(path).model_id
            reference = model_folder(self._store, model_id) / Model.REFERENCE
            if not reference.exists():
                return None
            return read_reference(reference, scores=scores_path(self._store, model_id))
        except ContractError as error:
            logger.warning("no drift is measured of model version %d: %s", version, error)
            return None
