"""KFP component of the deployment step. The step itself is in `__main__`."""

from kfp import dsl
from kfp.dsl import HTML, Artifact, Input, Output


@dsl.component(base_image="evergreen-deployment", install_kfp_package=False)
def deployment(
    run: str,
    run_resource: str,
    run_id: str,
    store: str,
    server: str,
    device: str,
    trigger_id: str,
    verdict: Input[Artifact],
    release: Output[Artifact],
    card: Output[HTML],
) -> None:
    """Request the release of an accepted model as one ONNX graph, after a parity check.

    The controller publishes the version, probes the servers, and records the release in the
    journal. If another release has made the verdict stale, the step ends without a release and
    without a retry. The step's record contains the reason.

    Args:
        run: Kubeflow's name of the run.
        run_resource: Name of the run's workflow. This name identifies a run of a schedule.
        run_id: Kubeflow's id of the run. Empty in a local run.
        store: Folder URI of the model registry, for the prepared version and the request.
        server: Backend in Triton, `python` (laptop) or `onnxruntime` (cluster).
        device: Device of `onnxruntime`, `cpu` or `gpu` (a MIG slice is a GPU).
        trigger_id: Retrain request that this run answers. Empty = none.
        verdict: Verdict manifest, which names the model and its holdout rows. The graph must
            reproduce its scores.
        release: Release manifest.
        card: Model card at the time of the release, as a web page.
    """
    from components.deployment.__main__ import main
    from evergreen.registry.runs import store_name
    from evergreen.runtime.flags import run_flags

    name = store_name(run, run_resource, run_id)
    flags = run_flags(
        run=name,
        store=store,
        server=server,
        device=device,
        trigger_id=trigger_id,
        verdict=verdict.path,
        output=release.path,
        html=card.path,
    )
    if code := main(flags):
        if code == 1:
            return  # a retry would be refused too
        raise SystemExit(code)
