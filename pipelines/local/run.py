"""One retraining run on this machine: fills the pipeline's parameters, runs it, answers how it ended.

The monitor's local trigger starts this as a process and reads its exit code; people call `evergreen run`. Running the
tasks is `pipelines.local.runner`'s.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from components.contracts.retrain_request import RetrainRequest
from components.runtime.errors import ContractError, PermanentError
from components.store.run_notes import RunOutcome, find_outcome
from pipelines.images import ENVIRONMENT_OF_STEP
from pipelines.local import environments
from pipelines.local.runner import PipelineFailed, run_pipeline
from pipelines.package import check_parameters

logger = logging.getLogger(__name__)

EXIT_CODES = {"released": 0, "refused": 1, "failed": 3}


@dataclass(frozen=True, kw_only=True)
class LocalFolders:
    """Where a laptop keeps what a cluster keeps on its shared volume."""

    root: Path

    @property
    def lake(self) -> Path:
        """Click logs by day."""
        return self.root / "lake"

    @property
    def store(self) -> Path:
        """Models, releases, journal, notes of runs."""
        return self.root / "store"

    @property
    def work(self) -> Path:
        """The runs' intermediate files."""
        return self.root / "work"

    @property
    def repository(self) -> Path:
        """Triton's model repository."""
        return self.root / "repository"

    @property
    def artifacts(self) -> Path:
        """KFP's artifacts."""
        return self.root / "artifacts"

    @property
    def logs(self) -> Path:
        """One log per task and per process."""
        return self.root / "logs"

    def pipeline_arguments(self) -> dict[str, Any]:
        """The pipeline parameters that these folders decide.

        Raises:
            ContractError: a folder cannot be made.
        """
        for folder in (self.lake, self.store, self.work, self.repository):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ContractError(f"folder {folder} cannot be made: {error.strerror}") from error
        return {
            "lake": self.lake.as_uri(),
            "store": self.store.as_uri(),
            "work": self.work.as_uri(),
            "repository": self.repository.as_uri(),
            "server": "python",
        }


def run_once(
    package: Path, folders: LocalFolders, parameters: Mapping[str, Any], request: RetrainRequest | None
) -> RunOutcome:
    """Runs the compiled pipeline once and returns how it ended.

    Args:
        package: Compiled pipeline.
        folders: This machine's folders.
        parameters: Pipeline parameters over the folders' and the defaults.
        request: Who asked and for which window; None for a run started by hand.

    Raises:
        ContractError: the package or an environment is absent, a folder cannot be made, or a parameter is not the
            pipeline's.
        PermanentError: the run ended without an outcome: KFP itself failed.
    """
    pythons = {name: environments.python_of(name) for name in set(ENVIRONMENT_OF_STEP.values())}
    _check(package, pythons, parameters)
    now = datetime.now(timezone.utc)
    arguments = {
        **folders.pipeline_arguments(),
        "trigger_id": f"manual-{now:%Y%m%dT%H%M%S%f}",
        **parameters,
        **(request.pipeline_arguments() if request else {}),
    }
    trigger_id = arguments["trigger_id"]
    logs = folders.logs / "runs" / trigger_id
    signal.signal(signal.SIGTERM, _stop)
    logger.info("run %s started", trigger_id)
    failure = ""
    try:
        run_pipeline(
            package,
            arguments,
            root=folders.artifacts,
            logs=logs,
            pythons=pythons,
            source=environments.REPOSITORY,
        )
    except PipelineFailed as error:
        failure = str(error)
    outcome = find_outcome(folders.store, trigger_id)
    if outcome is None:
        raise PermanentError(f"run {trigger_id} ended without an outcome: {failure or 'see'} {logs / 'kfp.log'}")
    logger.info("run %s %s at %s: %s", trigger_id, outcome.state, outcome.step, outcome.reason)
    return outcome


def _check(package: Path, pythons: Mapping[str, Path], parameters: Mapping[str, Any]) -> None:
    """Raises `ContractError` for what KFP would tell with a traceback, or would not tell at all."""
    for name, python in sorted(pythons.items()):
        if not python.exists():  # the task would run in whatever `python3` comes next on PATH
            raise ContractError(f"environment {name} is absent, expected {python}; `make environments` builds it")
    check_parameters(package, parameters)


def _stop(signum: int, _frame: Any) -> None:
    """Leaves the run, which ends its task on the way out; a second signal does not cut that short."""
    signal.signal(signum, signal.SIG_IGN)
    raise SystemExit(128 + signum)
