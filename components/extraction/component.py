"""KFP component of the extraction step."""

from kfp import dsl
from kfp.dsl import Dataset, Output


@dsl.component(base_image="evergreen-extraction", install_kfp_package=False)
def extraction(
    run: str,
    run_resource: str,
    run_id: str,
    store: str,
    work: str,
    lake: str,
    window_start: str,
    window_end: str,
    parent: str,
    champion: str,
    recommender: str,
    settings: str,
    dask_scheduler: str,
    raw_dataset: Output[Dataset],
) -> None:
    """Copy one time window of click logs, sorted and deduplicated, into training and holdout rows.

    Args:
        run: Kubeflow's name of the run.
        run_resource: Name of the run's workflow. This name identifies a run of a schedule.
        run_id: Kubeflow's id of the run. Empty in a local run.
        store: Folder of the model registry, file:// URI or absolute path.
        work: Folder for big data, file:// URI or absolute path.
        lake: Lake with day=YYYY-MM-DD folders of Parquet, absolute path, file:// or gs://.
        window_start: ISO 8601 UTC, inclusive. Empty = after the parent's last training row.
        window_end: ISO 8601 UTC, exclusive. Empty = to the last row.
        parent: Model to continue: `current`, `none`, or a model's id.
        champion: Model to beat: `current`, `none`, or a released model's id.
        recommender: Accepted recommender: `current` (the newest), its number or its digest.
        settings: Changes of this run's settings, such as `training.seed=7 model.tower=[64,32]`.
        dask_scheduler: Address of a running Dask scheduler. Empty = this machine.
        raw_dataset: RawDataset manifest of the rows.
    """
    from components.extraction.__main__ import main
    from evergreen.registry.runs import store_name
    from evergreen.runtime.flags import run_flags

    flags = run_flags(
        run=store_name(run, run_resource, run_id),
        store=store,
        work=work,
        lake=lake,
        window_start=window_start,
        window_end=window_end,
        parent=parent,
        champion=champion,
        recommender=recommender,
        settings=settings,
        dask_scheduler=dask_scheduler,
        output=raw_dataset.path,
    )
    if code := main(flags):
        raise SystemExit(code)
