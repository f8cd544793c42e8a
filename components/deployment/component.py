"""Deployment's place in the pipeline; the work is in `__main__` and the modules beside it."""

from kfp import dsl
from kfp.dsl import Artifact, Dataset, Input, Metrics, Model, Output


@dsl.component(base_image="evergreen-deployment", install_kfp_package=False)
def deployment(
    run: str,
    store: str,
    work: str,
    repository: str,
    triton_urls: str,
    server: str,
    trigger_id: str,
    raw_dataset: Input[Dataset],
    model: Input[Model],
    verdict: Input[Artifact],
    release: Output[Artifact],
    metrics: Output[Metrics],
) -> None:
    """Releases an accepted model to Triton: one ONNX graph, parity proven, published whole, probed, recorded.

    Args:
        run: Name of this run.
        store: Model store, folder URI; gets the release manifest and the journal's line.
        work: Folder URI for big files of runs.
        repository: Triton's model repository, folder URI.
        triton_urls: host:grpc_port of each running Triton, comma-separated; empty = publish only.
        server: What runs the graph in Triton: `python` (laptop) or `onnxruntime` (cluster).
        trigger_id: Retrain request that this run answers; empty = none.
        raw_dataset: RawDataset manifest, for the held-out rows.
        model: Model manifest.
        verdict: Verdict manifest; its scores are what the graph must repeat.
        release: Release manifest.
        metrics: Version, parity and seconds.
    """
    from components.contracts.manifests import Release
    from components.deployment.__main__ import main

    flags = {"run": run, "store": store, "work": work, "repository": repository, "triton-urls": triton_urls}
    flags |= {"server": server, "trigger-id": trigger_id, "raw-dataset": raw_dataset.path, "model": model.path}
    flags |= {"verdict": verdict.path, "output": release.path}
    if code := main([f"--{name}={value}" for name, value in flags.items()]):
        raise SystemExit(code)
    done = Release.read(release.path)
    metrics.log_metric("version", done.version)
    metrics.log_metric("parity_max_abs_diff", done.parity_max_abs_diff)
    metrics.log_metric("parity_rows", done.parity_rows)
