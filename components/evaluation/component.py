"""The evaluation step as a KFP component. The work is done by `python -m components.evaluation`."""

from kfp import dsl
from kfp.dsl import HTML, Artifact, ClassificationMetrics, Input, Metrics, Model, Output


@dsl.component(base_image="evergreen-evaluation", install_kfp_package=False)
def evaluation(
    run: str,
    run_resource: str,
    run_id: str,
    store: str,
    work: str,
    champion: str,
    model: Input[Model],
    verdict: Output[Artifact],
    metrics: Output[Metrics],
    roc: Output[ClassificationMetrics],
    report: Output[HTML],
) -> bool:
    """Check the candidate on the held-out rows: an AUC floor, and not worse than the live model.

    Args:
        run: Kubeflow's name of the run.
        run_resource: Name of the run's workflow. This name identifies a run of a schedule.
        run_id: Kubeflow's id of the run. Empty on this machine.
        store: Folder URI of the model registry.
        work: Folder URI for big data. The step writes below <work>/<run>/evaluation.
        champion: Model to compare with: current, none, or a released model's id.
        model: Model manifest of the candidate. This manifest names the manifest of the encoded
            rows, and that manifest names the raw rows.
        verdict: Verdict manifest.
        metrics: Metrics to compare runs by: the checks with their intervals, log loss, rows and the
            decision.
        roc: ROC curve of the candidate.
        report: The model's card after the gate: comparison, slices, drift, data, specification,
            lineage.

    Returns:
        Output: True if the candidate goes on to deployment.
    """
    import json
    from pathlib import Path

    from components.evaluation.__main__ import main
    from evergreen.registry.runs import store_name
    from evergreen.runtime.flags import run_flags

    name = store_name(run, run_resource, run_id)
    flags = run_flags(
        run=name,
        store=store,
        work=work,
        champion=champion,
        model=model.path,
        output=verdict.path,
        metrics=metrics.path,
        roc=roc.path,
        html=report.path,
    )
    if (code := main(flags)) > 1:
        raise SystemExit(code)
    if code and not Path(metrics.path).exists():
        return False  # refused before scoring: the champion changed since extraction
    for name, value in json.loads(Path(metrics.path).read_text()).items():
        metrics.log_metric(name, value)
    curve = json.loads(Path(roc.path).read_text())
    if curve["fpr"]:
        roc.log_roc_curve(**curve)
    return code == 0
