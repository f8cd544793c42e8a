"""The validation step as a KFP component. The work is done by `python -m components.validation`."""

from kfp import dsl
from kfp.dsl import HTML, Artifact, Dataset, Input, Output


@dsl.component(base_image="evergreen-validation", install_kfp_package=False)
def validation(
    run: str,
    run_resource: str,
    run_id: str,
    store: str,
    work: str,
    champion: str,
    served: str,
    beam_options: str,
    raw_dataset: Input[Dataset],
    valid_dataset: Output[Dataset],
    report: Output[Artifact],
    html: Output[HTML],
) -> bool:
    """Check the training rows with TFDV: anomalies, and drift against the champion's training rows.

    Args:
        run: Kubeflow's name of the run.
        run_resource: Name of the run's workflow. This name identifies a run of a schedule.
        run_id: Kubeflow's id of the run. Empty on this machine.
        store: URI of the model registry.
        work: URI of the folder for big files.
        champion: `current`, `none` or the id of a released model. Its statistics and schema are
            compared with the rows.
        served: Archive of served rows to compare with, folder or gs://. Empty = not compared.
        beam_options: Beam pipeline options for statistics of very large windows. Empty = the cores
            of this machine.
        raw_dataset: RawDataset manifest.
        valid_dataset: RawDataset manifest without the quarantined rows.
        report: ValidationReport manifest.
        html: Findings, drift and distributions for people.

    Returns:
        Output: True unless the rows must not be trained on.
    """
    from components.validation.__main__ import main
    from evergreen.registry.runs import store_name
    from evergreen.runtime.flags import run_flags

    name = store_name(run, run_resource, run_id)
    flags = run_flags(
        run=name,
        store=store,
        work=work,
        champion=champion,
        served=served,
        beam_options=beam_options,
        raw_dataset=raw_dataset.path,
        valid_dataset=valid_dataset.path,
        output=report.path,
        html=html.path,
    )
    if (code := main(flags)) > 1:
        raise SystemExit(code)
    return code == 0
