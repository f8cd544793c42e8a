"""One trial of a hyper-parameter search on a cluster: start a run, wait, and print its metrics.

Katib's collector reads the metrics from standard output, such as `auc=0.78`. Katib chooses the
settings of each trial from the manifest of `evergreen search --katib`. A run of a trial releases no
model.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from evergreen.registry.models import evaluated_run
from evergreen.registry.runs import find_outcome, store_name
from evergreen.runtime.errors import ContractError, PermanentError
from evergreen.runtime.exit_codes import exits_with_code
from evergreen.runtime.flags import CommandParser
from evergreen.runtime.kubeflow import (
    PIPELINE_NAME,
    SERVICE_ACCOUNT,
    KubeflowServer,
    describe_end,
    wait,
)
from evergreen.runtime.plain_text import log_as_text

_VARIABLE = "EVERGREEN_TRIAL_PARAMETERS"
"""Environment variable with the pipeline's parameters as JSON. The parameter `trigger_id` names the
trial."""
_EXPERIMENT = "evergreen-search"
"""Experiment of the trials in KFP. Trials must not belong to the monitor's experiment, because the
monitor starts no run while a run of that experiment is active."""


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run the newest version of the pipeline, print AUC and log loss of its model, and return 0."""
    parser = CommandParser(prog="python -m components.run_outcome.trial", description=__doc__)
    parser.add_argument("--host", required=True, help="address of the KFP API")
    parser.add_argument("--store", type=Path, required=True, help="folder of the registry")
    arguments = parser.parse_args(argv)
    log_as_text("%(asctime)s %(name)s %(message)s")
    parameters, server = json.loads(os.environ[_VARIABLE]), KubeflowServer(arguments.host)
    trial = parameters["trigger_id"]
    pipeline_id = server.find_pipeline(PIPELINE_NAME)
    version = server.newest_version(pipeline_id) if pipeline_id else None
    if version is None:
        raise ContractError(
            f"KFP at {arguments.host} has no pipeline {PIPELINE_NAME}, expected a pipeline "
            "uploaded by `submit --upload`"
        )
    experiment = server.experiment_id(_EXPERIMENT)
    run_id = server.start_run(
        experiment, trial, source=version, parameters=parameters, service_account=SERVICE_ACCOUNT
    )
    ended = wait(server, run_id, seconds=24 * 3600.0)
    outcome = find_outcome(arguments.store, store_name(trial, "", run_id))
    evaluated = evaluated_run(arguments.store, outcome.run) if outcome else None
    if evaluated is None:
        raise PermanentError(
            f"run {run_id} was not evaluated: {outcome.reason if outcome else describe_end(ended)}"
        )
    print(
        f"auc={evaluated[0].candidate.auc}\nlog_loss={evaluated[0].candidate.log_loss}", flush=True
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
