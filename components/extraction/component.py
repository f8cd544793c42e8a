"""The extraction step's KFP signature."""

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
    """Copies one time window of click logs, sorted and without duplicates, into training and held-out rows.

    Args:
        run: Kubeflow's name of the run.
        run_resource: Name of its workflow, which counts where a schedule's run has no other.
        run_id: Kubeflow's id of it; empty on this machine.
        store: Model store; file:// URI or absolute path.
        work: Folder for big data; file:// URI or absolute path.
        lake: Lake with day=YYYY-MM-DD folders of Parquet; absolute path, file:// or gs://.
        window_start: ISO 8601 UTC, inclusive; empty = after the last row that the parent learned.
        window_end: ISO 8601 UTC, exclusive; empty = to the last row.
        parent: Model to continue: `current`, `none`, or a model's id.
        champion: Model to beat: `current`, `none`, or a released model's id.
        recommender: Accepted description of the store: `current` (the newest), its number or its digest.
        settings: Changes of this run to it, such as `training.seed=7 model.tower=[64,32]`.
        dask_scheduler: Address of a running Dask scheduler; empty = this machine.
        raw_dataset: RawDataset manifest of the rows.
    """
    from components.extraction.__main__ import main
    from evergreen.registry.runs import store_name
    from evergreen.runtime.flags import run_flags

    flags = run_flags(
        run=store_name(run, run_resource, run_id), store=store, work=work, lake=lake, window_start=window_start,
        window_end=window_end, parent=parent, champion=champion, recommender=recommender, settings=settings,
        dask_scheduler=dask_scheduler, output=raw_dataset.path)  # fmt: skip
    if code := main(flags):
        raise SystemExit(code)
