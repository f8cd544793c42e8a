"""Measure how training scales out: the TorchRec engine with one and two processes.

`python -m benchmarks.scaling` runs in the training environment, and compares with the PyTorch
engine. Each engine trains on the same encoded rows from the same Parquet files, with one thread per
process. Step times at two batch sizes give the cost per step and per row. Two processes also
exchange data. The exchange has a cost per step and a cost per byte. The number of bytes is computed
from TorchRec's plan. If a network namespace can be created, the bytes are also counted by the
kernel.

The costs per step, per row and per byte are extrapolated to GPUs with stated assumptions. No figure
was measured on a GPU. Finally, TorchRec's planner shards a table of a billion rows without
allocating it.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.command import benchmark_parser, documented
from benchmarks.encoded_rows import SAMPLE_SLOT_SIZES, PlantedLogit
from benchmarks.spread import Figure, spread
from demo.environments import REPOSITORY
from evergreen.config.model import DcnConfig
from evergreen.config.training import TrainingSettings
from evergreen.contracts.criteo import CATEGORICAL, CRITEO, DENSE, NUM_CATEGORICAL, NUM_DENSE
from evergreen.contracts.raw_rows import LABEL
from evergreen.networks.network import build_network

_CONFIG = DcnConfig(num_dense=NUM_DENSE, num_categorical=NUM_CATEGORICAL)
_WIDTH = _CONFIG.embedding_dim
_BATCHES = (1024, 4096)
"""Rows per worker and step."""
_GROUP_ROWS = 4096
_STEPS, _ROUNDS = 20, 5
_LOOKUP_BYTES = 8 + 4 + 8
"""Bytes per lookup: the id, its weight and the length of its bag."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """Cost of a training step, apart from the computation of its rows."""

    seconds_per_step: float
    bytes_per_second: float
    """Bandwidth of each worker in bytes per second."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """Compute device of a worker."""

    seconds_per_step: float
    seconds_per_row: float


GPU = Device(seconds_per_step=1.5e-3, seconds_per_row=1 / 2_000_000)
"""Assumed values, which were not measured. One value is the time of the kernel launches of a step.
The other value is a speed of two million rows per second for the small network."""
NVLINK = Links(seconds_per_step=0.4e-3, bytes_per_second=150e9)
"""Assumed values for 8 GPUs of one machine: eight collectives of 50 us each, and half of the links'
bandwidth of 300 GB/s."""
INFINIBAND = Links(seconds_per_step=1.6e-3, bytes_per_second=20e9)
"""Assumed values for 64 GPUs on eight machines: eight collectives of 200 us each, and 80 % of a
bandwidth of 200 Gbit/s per GPU."""


def exchanged_bytes(workers: int, rows_per_worker: int) -> float:
    """Return the bytes that a worker sends per row.

    A worker sends the ids to look up, the vectors and their gradients, and the gradients of dense
    weights.

    >>> exchanged_bytes(1, 1024)
    0.0
    """
    away = (workers - 1) / workers
    dense = sum(each.numel() for each in build_network(_CONFIG).parameters())
    return away * (
        NUM_CATEGORICAL * (_LOOKUP_BYTES + 2 * 4 * _WIDTH) + 2 * 4 * dense / rows_per_worker
    )


def rows_per_second(workers: int, rows_per_worker: int, *, device: Device, network: Links) -> float:
    """Return the rows per second that the cost model predicts for a number of workers."""
    exchange = network.seconds_per_step + rows_per_worker * exchanged_bytes(
        workers, rows_per_worker
    ) / (network.bytes_per_second)
    own = device.seconds_per_step + rows_per_worker * device.seconds_per_row
    return workers * rows_per_worker / (own + (exchange if workers > 1 else 0.0))


def fitted(seconds: dict[int, float]) -> tuple[float, float]:
    """Compute seconds per step and per row from the step times at two numbers of rows."""
    (few, quick), (many, slow) = sorted(seconds.items())
    per_row = (slow - quick) / (many - few)
    return quick - per_row * few, per_row


def write_rows(folder: Path, num_rows: int) -> None:
    """Write encoded rows with the slot sizes of NVIDIA's sample, in many row groups."""
    rows, _ = PlantedLogit(SAMPLE_SLOT_SIZES).draw(num_rows, 1)
    columns = {LABEL: rows.labels} | {name: rows.dense[:, i] for i, name in enumerate(DENSE)}
    columns |= {name: rows.ids[:, i].astype(np.int64) for i, name in enumerate(CATEGORICAL)}
    pq.write_table(
        pa.table(columns), folder / "part.parquet", compression="NONE", row_group_size=_GROUP_ROWS
    )
    (folder / "_file_list.txt").write_text("1\npart.parquet\n")


def sent_on_loopback() -> int:
    """Return the bytes sent over the loopback, including headers."""
    line = next(
        each
        for each in Path("/proc/net/dev").read_text().splitlines()
        if each.strip().startswith("lo:")
    )
    return int(line.split()[9])


def measure(
    backend: str, folder: Path, *, num_rows: int, scratch: Path, rounds: int
) -> dict[str, Any]:
    """Return seconds per step and bytes per row of one engine, for each batch size per worker."""
    from components.training.backends import make_engine
    from components.training.rows import RowFolder
    from components.training.start import write_initial

    workers, settings = (
        int(os.environ.get("WORLD_SIZE", "1")),
        TrainingSettings(batch_size=max(_BATCHES)),
    )
    engine = make_engine(backend, _CONFIG, SAMPLE_SLOT_SIZES, settings=settings, scratch=scratch)
    write_initial(scratch / "initial", _CONFIG, SAMPLE_SLOT_SIZES, click_rate=0.25, seed=1)
    engine.restore(scratch / "initial")
    source = RowFolder(path=folder, num_rows=num_rows, features=CRITEO)
    rows = engine.open_rows([source], SAMPLE_SLOT_SIZES, scratch / "cache")
    order, found = np.random.default_rng(1).permutation(num_rows), {}
    for per_worker in _BATCHES:
        part, seconds = order[: workers * per_worker * _STEPS], []
        engine.train(
            rows, part[: workers * per_worker * 3], batch_size=workers * per_worker, seed=1
        )
        sent = sent_on_loopback()
        for _ in range(rounds):
            began = time.perf_counter()
            engine.train(rows, part, batch_size=workers * per_worker, seed=1)
            seconds.append((time.perf_counter() - began) / _STEPS)
        sent_per_row = (sent_on_loopback() - sent) / (rounds * len(part))
        found[per_worker] = {
            "seconds": median(seconds),
            "all": seconds,
            "sent_per_row": sent_per_row,
        }
    engine.close()
    return found


def run_baseline(
    backend: str, processes: int, folder: Path, *, num_rows: int, rounds: int
) -> dict[str, Any]:
    """Run `measure` in new processes.

    If the system allows it, the processes get a new network namespace.
    """
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.json"
        parameters = json.dumps([backend, str(folder), num_rows, scratch, rounds])
        torchrun = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(processes),
        ]
        launch = [
            sys.executable,
            *(torchrun if processes > 1 else ()),
            "-m",
            "benchmarks.scaling",
            "--worker",
            parameters,
        ]
        alone = [
            "unshare",
            "--net",
            "--map-root-user",
            "sh",
            "-c",
            'ip link set lo up && exec "$@"',
            "sh",
        ]
        is_alone = subprocess.run([*alone, "true"], capture_output=True).returncode == 0
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [*(alone if is_alone else ()), *launch]
        done = subprocess.run(
            command, cwd=REPOSITORY, env=variables, capture_output=True, text=True
        )
        if done.returncode or not result.exists():
            raise RuntimeError(
                f"{backend} in {processes} processes ended with {done.returncode}: "
                f"{done.stderr[-2000:]}"
            )
        found = {int(rows): each for rows, each in json.loads(result.read_text()).items()}
        return (
            found
            if is_alone
            else {rows: {**each, "sent_per_row": None} for rows, each in found.items()}
        )


def work(parameters: str) -> int:
    """Run one process of an engine. Only the leader (rank 0) measures."""
    backend, folder, num_rows, scratch, rounds = json.loads(parameters)
    if os.environ.get("RANK", "0") != "0":
        from components.training.torchrec.engine import follow

        follow()
        return 0
    found = measure(backend, Path(folder), num_rows=num_rows, scratch=Path(scratch), rounds=rounds)
    (Path(scratch) / "result.json").write_text(json.dumps(found))
    return 0


def billion_row_plan(workers: int = 64) -> dict[str, Any]:
    """Return TorchRec's plan for the sample's tables and a table with a billion rows.

    The plan assumes GPUs of 80 GB. No memory is allocated for the tables.
    """
    from torchrec.distributed.planner import Topology
    from torchrec.distributed.types import ShardingType

    from components.training.torchrec.tables import Sharder, planner_of, table_collection
    from evergreen.networks.files import one_id_per_slot

    sizes = [1_000_000_000, *SAMPLE_SLOT_SIZES[1:]]
    tables = table_collection(sizes, one_id_per_slot(sizes), _CONFIG)
    topology = Topology(workers, "cuda", hbm_cap=80 << 30, local_world_size=8)
    ways = [ShardingType.TABLE_WISE.value, ShardingType.COLUMN_WISE.value]
    plan = planner_of(topology, tables, batch_size=4096, sharding=ways).plan(tables, [Sharder()])
    print(f"\n{plan}")
    (shards,) = plan.plan.values()
    bytes_of_rank: dict[int, int] = {}
    for each in shards.values():
        for shard in each.sharding_spec.shards:
            rank = shard.placement.rank()
            bytes_of_rank[rank] = bytes_of_rank.get(rank, 0) + 3 * 4 * int(
                np.prod(shard.shard_sizes)
            )
    big = [
        (shard.placement.rank(), shard.shard_sizes) for shard in shards["0"].sharding_spec.shards
    ]
    return {
        "workers": workers,
        "largest_bytes": max(bytes_of_rank.values()),
        "big_table": big,
        "way": shards["0"].sharding_type,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both engines, fit the cost model, extrapolate it, and plan a large table."""
    parser = benchmark_parser("scaling", __doc__, quick="half a minute less: one round")
    parser.add_argument("--worker", help="(internal) one process of an engine")
    flags = parser.parse_args(argv)
    if flags.worker:
        return work(flags.worker)
    rounds, num_rows = 1 if flags.quick else _ROUNDS, 2 * max(_BATCHES) * _STEPS
    del flags.worker
    with documented(flags) as document, tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
        write_rows(Path(scratch), num_rows)
        results: dict[str, Any] = {}
        for backend, processes in (("pytorch", 1), ("torchrec", 1), ("torchrec", 2)):
            name = f"{backend} {processes}"
            results[name] = found = run_baseline(
                backend, processes, Path(scratch), num_rows=num_rows, rounds=rounds
            )
            for rows, each in found.items():
                rates, case = (
                    [processes * rows / seconds for seconds in each["all"]],
                    f"{name}, {rows} rows a worker",
                )
                document["figures"].append(Figure(case, spread(rates), "rows/s"))
                if processes > 1 and each["sent_per_row"]:
                    sent, limit = (
                        spread([each["sent_per_row"]]),
                        f"{exchanged_bytes(processes, rows):,.0f} computed",
                    )
                    document["figures"].append(
                        Figure(f"{case}, sent per row", sent, "bytes", limit=limit)
                    )
        one, two = (
            {rows: each["seconds"] for rows, each in results[f"torchrec {n}"].items()}
            for n in (1, 2)
        )
        device = Device(**dict(zip(("seconds_per_step", "seconds_per_row"), fitted(one))))
        per_step, per_row = fitted({rows: two[rows] - one[rows] for rows in _BATCHES})
        sent = exchanged_bytes(2, max(_BATCHES))
        here = Links(
            seconds_per_step=max(per_step, 0.0), bytes_per_second=sent / max(per_row, 1e-12)
        )
        document |= {"results": results, "fitted": {"device": vars(device), "network": vars(here)}}
        print(f"fitted here: {device}, {here}")
        extrapolated = document["extrapolated"] = {}
        for name, workers, network in (("8 GPUs", 8, NVLINK), ("64 GPUs", 64, INFINIBAND)):
            for rows in (2048, 16384):
                rate, alone = (
                    rows_per_second(each, rows, device=GPU, network=network)
                    for each in (workers, 1)
                )
                extrapolated[f"{name}, {rows}"] = {
                    "rows_per_second": rate,
                    "efficiency": rate / workers / alone,
                }
                print(
                    f"assumed {name}, {rows} rows each: {rate:,.0f} rows/s, "
                    f"{rate / workers / alone:.0%} of linear"
                )
        document["assumed"] = {
            "gpu": vars(GPU),
            "8 GPUs": vars(NVLINK),
            "64 GPUs": vars(INFINIBAND),
        }
        document["billion_rows"] = billion_row_plan()
    return 0


if __name__ == "__main__":
    sys.exit(main())
