"""Run a stock NVTabular script as the peer of the preprocessing step.

The script follows NVTabular's documentation.

The script uses the default reader, operators, scheduler and files. The script calls fit once, and
calls transform and to_parquet once per part. Only the output types are set explicitly, because
HugeCTR misreads the default types. `python -m benchmarks.stock_nvtabular RAW OUT` fits on
`RAW/train`, and writes the encoded rows of `RAW/train` and `RAW/holdout` below `OUT`.
"""

import sys
import warnings
from pathlib import Path

CATEGORICAL = [f"C{i}" for i in range(1, 27)]
DENSE = [f"I{i}" for i in range(1, 14)]
LABEL = "label"
FREQUENCY_THRESHOLD = 2


def run(raw: Path, out: Path) -> None:
    """Fit on `raw/train`, then write the encoded rows of both parts below `out`.

    The parts are `raw/train` and `raw/holdout`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import nvtabular as nvt
        from nvtabular import ops
    ids = CATEGORICAL >> ops.Categorify(
        freq_threshold=FREQUENCY_THRESHOLD, out_path=str(out / "workflow")
    )
    values = DENSE >> ops.FillMissing() >> ops.Clip(min_value=0) >> ops.LogOp() >> ops.Normalize()
    workflow = nvt.Workflow([LABEL] + values + ids)
    parts = {
        part: nvt.Dataset(str(raw / part / "*.parquet"), engine="parquet", cpu=True)
        for part in ("train", "holdout")
    }
    workflow.fit(parts["train"])
    types = {**dict.fromkeys(CATEGORICAL, "int64"), **dict.fromkeys([LABEL, *DENSE], "float32")}
    for part, dataset in parts.items():
        workflow.transform(dataset).to_parquet(
            str(out / part), cats=CATEGORICAL, conts=DENSE, labels=[LABEL], dtypes=types
        )


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]))
