"""Fit the feature workflow on a Parquet file, and write the workflow in two forms.

The fit is the same as in preprocessing.

`python -m benchmarks.serving_peers.fit_workflow RAW_FOLDER NUM_ROWS OUTPUT` writes
`OUTPUT/features`, from which our graph is built, and `OUTPUT/nvtabular`, the NVTabular workflow of
the reference. Both forms encode rows equally.
"""

import sys
from pathlib import Path

from components.preprocessing import fitting, numpy_engine, nvtabular_engine, raw_partitions
from evergreen.config.preprocessing import PreprocessingSettings
from evergreen.contracts.criteo import CRITEO
from evergreen.contracts.raw_rows import LABEL
from evergreen.runtime.workers import THIS_PROCESS


def fit(raw: Path, num_rows: int, output: Path) -> None:
    """Fit a workflow on the rows in `raw`, and write it in both forms."""
    plan = raw_partitions.plan_partitions(
        raw, expected_rows=num_rows, partition_rows=100_000, features=CRITEO
    )
    unscaled = numpy_engine.unscaler(CRITEO, CRITEO.numeric)
    scratch = output / "scratch"
    statistics = fitting.statistics_of_all(
        [plan], unscaled=unscaled, workers=THIS_PROCESS, scratch=scratch
    )
    rules = PreprocessingSettings(frequency_threshold=1)
    features, _ = fitting.next_workflow(statistics, of=CRITEO, parent=None, now=0, rules=rules)
    features.save(output / "features")
    workflow = nvtabular_engine.explicit_workflow(features, output / "storage")
    workflow.remove_inputs([LABEL])
    workflow.save(str(output / "nvtabular"))


if __name__ == "__main__":
    fit(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
