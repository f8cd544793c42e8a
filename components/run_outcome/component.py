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
    """Records how the run ended, which step decided it and why, and notifies a webhook where one is set.

    Args:
        run: Kubeflow's name of the run.
        run_resource: Name of its workflow, which counts where a schedule's run has no other.
        run_id: Kubeflow's id of it; empty on this machine.
        store: Folder of the model store.
        trigger_id: Retrain request that the run answers; empty for a run started by hand.
        trigger_reason: Why it was started.
        status: The final state of the run in KFP.

    Returns:
        One sentence: released, on trial as a canary, refused or failed, by which step, and why.
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
