"""A stock NVTabular script over the same rows, as its documentation has it: the peer of the preprocessing step.

Default reader, default operators, default scheduler and files; one fit, one transform and one to_parquet per part. A
process of its own, which prints the seconds of each phase as JSON. Only the types of the output are asked for, because
HugeCTR would misread others.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

CATEGORICAL = [f"C{i}" for i in range(1, 27)]
DENSE = [f"I{i}" for i in range(1, 14)]
LABEL = "label"


def run(raw: Path, out: Path, frequency_threshold: int) -> dict[str, float]:
    """Fits on `raw/train`, encodes it and `raw/holdout` below `out`; seconds by phase."""
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import nvtabular as nvt
        from nvtabular import ops
    imported = time.perf_counter()
    ids = CATEGORICAL >> ops.Categorify(freq_threshold=frequency_threshold, out_path=str(out / "workflow"))
    values = DENSE >> ops.FillMissing() >> ops.Clip(min_value=0) >> ops.LogOp() >> ops.Normalize()
    workflow = nvt.Workflow([LABEL] + values + ids)
    parts = {
        part: nvt.Dataset(str(raw / part / "*.parquet"), engine="parquet", cpu=True) for part in ("train", "holdout")
    }
    workflow.fit(parts["train"])
    fitted = time.perf_counter()
    types = {**dict.fromkeys(CATEGORICAL, "int64"), **dict.fromkeys([LABEL, *DENSE], "float32")}
    for part, dataset in parts.items():
        workflow.transform(dataset).to_parquet(
            str(out / part), cats=CATEGORICAL, conts=DENSE, labels=[LABEL], dtypes=types
        )
    ended = time.perf_counter()
    return {"imports": imported - began, "fit": fitted - imported, "transform": ended - fitted}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stock_nvtabular", description=__doc__)
    parser.add_argument("raw", type=Path, help="folder with train/ and holdout/")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--frequency-threshold", type=int, default=2, help="as the step's (default %(default)s)")
    flags = parser.parse_args(argv)
    print(json.dumps(run(flags.raw, flags.out, flags.frequency_threshold)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
