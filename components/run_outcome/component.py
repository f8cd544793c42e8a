"""KFP component of the exit handler."""

from kfp import dsl


@dsl.component(base_image="evergreen-run-outcome", install_kfp_package=False)
def run_outcome(
    run: str,
    run_resource: str,
    run_id: str,
    store: str,
    trigger_id: str,
    trigger_reason: str,
    status: dsl.PipelineTaskFinalStatus,
) -> str:
    """Record how the run ended, which step decided it and why, and notify a webhook if one is set.

    Args:
        run: Kubeflow's name of the run.
        run_resource: Name of the run's workflow. This name identifies a run of a schedule.
        run_id: Kubeflow's id of the run. Empty in a local run.
        store: Folder URI of the model registry.
        trigger_id: Retrain request that the run answers. Empty for a run started by hand.
        trigger_reason: Why the run was started.
        status: The run's final state in KFP.

    Returns:
        One sentence: the outcome (released, canary, refused or failed), the deciding step, and the
            reason.
    """
    from components.run_outcome.__main__ import record
    from evergreen.registry.runs import store_name

    return record(
        run=store_name(run, run_resource, run_id),
        store=store,
        trigger_id=trigger_id,
        trigger_reason=trigger_reason,
        kfp_state=status.state,
    )
