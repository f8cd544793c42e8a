"""Deployment's place in the pipeline; the work is in `__main__` and the modules beside it."""

from kfp import dsl
from kfp.dsl import HTML, Artifact, Input, Output


@dsl.component(base_image="evergreen-deployment", install_kfp_package=False)
def deployment(
    run: str,
    run_resource: str,
    run_id: str,
    store: str,
    repository: str,
    triton_urls: str,
    server: str,
    device: str,
    trigger_id: str,
    verdict: Input[Artifact],
    release: Output[Artifact],
    card: Output[HTML],
) -> None:
    """Releases an accepted model to Triton: one ONNX graph, parity proven, published whole, probed, recorded.

    A verdict that another release has made stale ends the step without a release or a retry; its note gives the reason.

    Args:
        run: Kubeflow's name of the run.
        run_resource: Name of its workflow, which counts where a schedule's run has no other.
        run_id: Kubeflow's id of it; empty on this machine.
        store: Model store, folder URI; gets the release manifest and the journal's line.
        repository: Triton's model repository, folder URI.
        triton_urls: Running servers, each host:grpc_port or dns:///name:grpc_port (every address of a headless
            Service), comma-separated; empty = publish only.
        server: What runs the graph in Triton: `python` (laptop) or `onnxruntime` (cluster).
        device: What `onnxruntime` runs on, `cpu` or `gpu` (a MIG slice is a GPU).
        trigger_id: Retrain request that this run answers; empty = none.
        verdict: Verdict manifest; it names the model and the held-out rows, and its scores are what the graph must
            repeat.
        release: Release manifest.
        card: The model's card as of its release, for people.
    """
    from components.deployment.__main__ import main
    from evergreen.registry.runs import store_name
    from evergreen.runtime.flags import run_flags

    name = store_name(run, run_resource, run_id)
    flags = run_flags(
        run=name, store=store, repository=repository, triton_urls=triton_urls, server=server, device=device,
        trigger_id=trigger_id, verdict=verdict.path, output=release.path, html=card.path)  # fmt: skip
    if code := main(flags):
        if code == 1:
            return  # refused: a retry would be refused too
        raise SystemExit(code)
