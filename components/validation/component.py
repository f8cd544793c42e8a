"""The validation step as a KFP component; the work is `python -m components.validation`."""

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
    """Judges the training rows with TFDV: anomalies, and drift against the champion's training rows.

    Args:
        run: Kubeflow's name of the run.
        run_resource: Name of its workflow, which counts where a schedule's run has no other.
        run_id: Kubeflow's id of it; empty on this machine.
        store: URI of the model store.
        work: URI of the folder for big files.
        champion: `current`, `none` or the id of a released model; rows are judged by its statistics and schema.
        served: Archive of served rows that training rows are compared with, folder or gs://; empty = not compared.
        beam_options: Beam pipeline options for statistics of very large windows; empty = the cores of this machine.
        raw_dataset: RawDataset manifest.
        valid_dataset: RawDataset manifest without the rows that were quarantined.
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
        run=name, store=store, work=work, champion=champion, served=served, beam_options=beam_options,
        raw_dataset=raw_dataset.path, valid_dataset=valid_dataset.path, output=report.path, html=html.path)  # fmt: skip
    if (code := main(flags)) > 1:
        raise SystemExit(code)
    return code == 0
