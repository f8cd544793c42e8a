"""The extraction step's KFP signature."""

from kfp import dsl
from kfp.dsl import Dataset, Metrics, Output


@dsl.component(base_image="evergreen-extraction", install_kfp_package=False)
def extraction(
    run: str,
    store: str,
    work: str,
    lake: str,
    window_start: str,
    window_end: str,
    parent: str,
    champion: str,
    holdout_fraction: float,
    max_malformed_fraction: float,
    replay_share: float,
    replay_days: int,
    window_days: float,
    full_days: float,
    late_days: int,
    columns: str,
    negative_rate: float,
    attribution_hours: float,
    raw_dataset: Output[Dataset],
    metrics: Output[Metrics],
) -> None:
    """Copies one time window of click logs, sorted and without duplicates, into training and held-out rows.

    Args:
        run: Name of the run.
        store: Model store; file:// URI or absolute path.
        work: Folder for big data; file:// URI or absolute path.
        lake: Lake with day=YYYY-MM-DD folders of Parquet; absolute path, file:// or gs://.
        window_start: ISO 8601 UTC, inclusive; empty = after the last row that the parent learned.
        window_end: ISO 8601 UTC, exclusive; empty = to the last row.
        parent: Model to continue: `current`, `none`, or a model's id.
        champion: Model to beat: `current`, `none`, or a released model's id.
        holdout_fraction: Share of the rows, the newest ones, that are kept from training; fewer where parent or
            champion learned some of them.
        max_malformed_fraction: Share of a file's rows that may be malformed before the step stops.
        replay_share: Share of rows from days before the window among those that training learns from; 0 = none.
        replay_days: Newest days with rows before the window, of which old rows are drawn, also to measure; 0 = none.
        window_days: Days that the window has, counted back from its end; 0 = `window_start` says.
        full_days: The same without a parent, where neither of the two says; 0 = from the first row.
        late_days: Days before the last row that the parent learned of which late rows are learned, too; 0 = none.
        columns: Features to learn from, comma-separated; empty = all 39.
        negative_rate: Share of the training rows without a click that is kept; 1 = all.
        attribution_hours: Hours after a row in which its click may still come; younger rows wait for a later round.
        raw_dataset: RawDataset manifest of the rows.
        metrics: Counts of rows.
    """
    flags = {name: value for name, value in locals().items() if name not in ("raw_dataset", "metrics")}
    from components.contracts.manifests import RawDataset
    from components.extraction.__main__ import main
    from components.runtime.flags import run_flags

    if code := main(run_flags(**flags, output=raw_dataset.path)):
        raise SystemExit(code)
    dataset = RawDataset.read(raw_dataset.path)
    counted = ("train_rows", "holdout_rows", "straddling_rows", "late_rows", "replay_rows", "replay_holdout_rows")
    for name in (*counted, "malformed", "duplicates"):
        metrics.log_metric(f"num_{name}", getattr(dataset, f"num_{name}"))
