"""Compare the speed of training with peers on the same machine.

Run by `make benchmark-training`. Prints rows per second, AUC and ratios for networks on two tables,
and writes all figures as JSON. A missed target is printed, and the exit code stays 0. If a peer
computes another network than ours, the benchmark fails. If a peer is not installed or does not have
a network, it is reported as left out. `speed` defines the measurement, and `peers` defines the
peers.
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.command import benchmark_parser, documented
from benchmarks.encoded_rows import SAMPLE_SLOT_SIZES
from benchmarks.spread import Figure, short, spread
from evergreen.config.features import Features, ListOptions
from evergreen.config.model import DcnConfig, DeepFmConfig, DlrmConfig, NetworkConfig
from evergreen.contracts.criteo import CRITEO, NUM_CATEGORICAL, NUM_DENSE

_COLUMNS = {"num_dense": NUM_DENSE, "num_categorical": NUM_CATEGORICAL}
_SMALL = DcnConfig(**_COLUMNS)
_LISTS = replace(CRITEO, lists=("last",), list_options={"last": ListOptions(max=20, table="C1")})
_NETWORKS: dict[str, tuple[NetworkConfig, Features]] = {
    "small": (_SMALL, CRITEO),
    "sample": (replace(_SMALL, num_cross_layers=6, tower=(1024, 1024)), CRITEO),
    "deepfm": (DeepFmConfig(**_COLUMNS), CRITEO),
    "dlrm": (DlrmConfig(**_COLUMNS), CRITEO),
    "lists": (replace(_SMALL, num_categorical=NUM_CATEGORICAL + 1), _LISTS),
}
"""Networks by name. `sample` is NVIDIA's DCN sample. `lists` has one more vector, which is the mean
of up to 20 vectors of the first column."""
_TABLES = {"1.2M": sum(SAMPLE_SLOT_SIZES), "10M": 10_000_000}
CASES = tuple(f"{network}-{table}" for table in _TABLES for network in _NETWORKS)
_ROUNDS_AND_STEPS = {"1.2M": (6, 40), "10M": (5, 16)}
_QUICK_ROUNDS_AND_STEPS = {"1.2M": (4, 5), "10M": (3, 3)}
"""Number of rounds and of steps in a quick run. The AUCs of a quick run are meaningless, because 15
steps hardly train a model."""
_BATCH_SIZE = 2048
"""Rows per optimizer step. All engines use the same batch size."""
_RATIO_TARGETS = {"1.2M": 5, "10M": 20}
_AUC_TARGET = 0.002


def measure_case(name: str, scratch: Path, *, is_quick: bool) -> dict[str, Any]:
    """Return our figures and the peers' figures for one network and one table."""
    # Import torch late, because it takes a second, and wrong flags are reported without it.
    from benchmarks import speed

    network, table = name.split("-")
    config, features = _NETWORKS[network]
    rounds, steps = (_QUICK_ROUNDS_AND_STEPS if is_quick else _ROUNDS_AND_STEPS)[table]
    case = speed.Case(
        name=name,
        config=config,
        features=features,
        table_rows=_TABLES[table],
        rounds=rounds,
        steps=steps,
    )
    return speed.measure(case, _BATCH_SIZE, scratch)


def print_case(result: dict[str, Any]) -> None:
    """Print the table of one case."""
    print(
        f"\n{result['case']}: {result['rounds']} rounds of {result['steps']} steps after one that "
        "warms up;"
        f" {result['rows']:,} rows trained, best possible AUC {result['best_possible_auc']:.4f}"
    )
    print(
        f"  {'':<20} {'rows/s':>32} {'ratio to ' + result['faster_peer']:>30} {'AUC':>8} "
        f"{'difference':>11}"
    )
    for name, figures in result["trainers"].items():
        rate, ratio = figures["rows_per_second"].shown(",.0f"), figures["ratio"].shown(".2f")
        print(
            f"  {name:<20} {rate:>32} {ratio:>30} {figures['auc']:>8.4f} "
            f"{figures['auc_difference']:>+11.4f}"
        )
    for reason in skipped_of(result):
        print(f"  left out: {reason}")


def skipped_of(result: dict[str, Any]) -> list[str]:
    """Return a text for each peer that was left out of a case."""
    return [f"{peer} in {result['case']}: {reason}" for peer, reason in result["left_out"].items()]


def figures_of(result: dict[str, Any], *, ratio_target: float) -> list[Figure]:
    """Return the figures of one case.

    There are three kinds of figures: our ratio to the fastest peer that trains with Adam, the rows
    per second, and the AUC. A higher speed must not lower the AUC. Peers with another optimizer are
    compared without a target.
    """
    rows = []
    for name in result["ours"]:
        figures, case = result["trainers"][name], f"{result['case']}, {name.split()[-1]}"
        share, limit = figures.get("product_share"), None
        if share is not None:
            at_most = short(figures["ratio"].median / share)
            limit = f"{share:.0%} of torch's products alone, which would be {at_most} times"
        peer, difference = result["faster_peer"], spread([figures["auc_difference"]])
        rows += [
            Figure(
                case, figures["ratio"], peer=peer, target=ratio_target, is_least=True, limit=limit
            ),
            Figure(f"{case}, rate", figures["rows_per_second"], "rows/s"),
            Figure(
                f"{case}, AUC less the better peer's",
                difference,
                "",
                target=-_AUC_TARGET,
                is_least=True,
            ),
        ]
        others = result["ratios_to_other_optimizers"][name]
        for other, ratio in others.items():
            difference = spread([figures["auc"] - result["trainers"][other]["auc"]])
            rows += [
                Figure(case, ratio, peer=other),
                Figure(f"{case}, AUC less that of {other}", difference, ""),
            ]
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases, and return 0."""
    parser = benchmark_parser(
        "training", __doc__, quick="a minute or two: fewer rounds, AUCs without meaning"
    )
    parser.add_argument("--table", choices=list(_TABLES), help="rows of the table (default: each)")
    flags = parser.parse_args(argv)
    tables = [flags.table] if flags.table else list(_TABLES)
    with documented(flags) as document:
        print(f"batches of {_BATCH_SIZE} rows; median (least to most) of rounds", flush=True)
        results = document["results"] = {}
        for name in (case for case in CASES if case.split("-")[1] in tables):
            with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
                results[name] = measure_case(name, Path(scratch), is_quick=flags.quick)
            print_case(results[name])
            document["figures"] += figures_of(
                results[name], ratio_target=_RATIO_TARGETS[name.split("-")[1]]
            )
        document["figures"] += [values_read(results, table) for table in tables]
        document["skipped"] = [each for result in results.values() for each in skipped_of(result)]
    return 0


def values_read(results: dict[str, Any], table: str) -> Figure:
    """Return the reading rate of rows with lists, relative to rows with only Criteo's columns.

    The rate is in values per second. Each element of a list counts as one value.
    """
    ours = "evergreen float32"
    rates = [
        results[f"{case}-{table}"]["trainers"][ours]["rows_per_second"].median
        for case in ("lists", "small")
    ]
    counts = [
        len(features.dense_inputs) + len(features.position_names) for features in (_LISTS, CRITEO)
    ]
    ratio = rates[0] * counts[0] / (rates[1] * counts[1])
    return Figure(
        f"lists-{table}, values/s",
        spread([ratio]),
        peer=f"small-{table}",
        target=1 / 1.5,
        is_least=True,
    )


if __name__ == "__main__":
    sys.exit(main())
