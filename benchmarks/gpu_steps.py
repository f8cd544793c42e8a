"""Define the steps of `benchmarks.gpu`.

Each step runs on the GPU. Without a GPU, each step runs on the CPU with tiny inputs.

A rate is measured over complete passes over rows in memory, in batches of `BATCH` rows, after a
warm-up pass. While the GPU computes, the CPU gathers the next batches of our engine. The keys of a
batch are sorted on the GPU. Plain PyTorch and TorchRec get shuffled batches in pinned memory, which
makes them faster. All three engines train the same `nn.Module`.
"""

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.encoded_rows import SAMPLE_SLOT_SIZES, PlantedLogit, slot_sizes_for
from benchmarks.gpu_plan import DEFAULT_RATES
from benchmarks.peers import PlainNetwork
from benchmarks.speed import products_of_row, products_per_second
from benchmarks.spread import Figure, Spread, short, spread
from components.training.pytorch.engine import PytorchEngine
from components.training.rows import Rows
from components.training.start import write_initial
from components.training.torch_parts import assemble
from demo.environments import REPOSITORY
from evergreen.config.model import DcnConfig, DeepFmConfig, DlrmConfig, NetworkConfig
from evergreen.config.training import PRECISIONS, TrainingSettings
from evergreen.contracts.criteo import CRITEO, NUM_CATEGORICAL, NUM_DENSE
from evergreen.networks.network import build_network

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COLUMNS = {"num_dense": NUM_DENSE, "num_categorical": NUM_CATEGORICAL, "embedding_dim": 16}
WIDTH = COLUMNS["embedding_dim"]
CONFIGS: dict[str, NetworkConfig] = {
    "dcn": DcnConfig(**COLUMNS, num_cross_layers=6, tower=(1024, 1024)),
    "deepfm": DeepFmConfig(**COLUMNS, tower=(400, 400, 400)),
    "dlrm": DlrmConfig(**COLUMNS, tower=(1024, 1024, 512, 256)),
}
"""Networks with the sizes of NVIDIA's samples of DCN, DeepFM and DLRM."""
TABLES = {"1.2M": sum(SAMPLE_SLOT_SIZES), "10M": 10_000_000, "100M": 100_000_000}
QUICK_TABLES = {"1.2M": 150_000, "10M": 200_000, "100M": 300_000}
BATCH, STEPS, PASSES = 65_536, 16, 4
QUICK_BATCH, QUICK_STEPS, QUICK_PASSES = 512, 3, 2
RATE_TARGET, BOUND_TARGET = 3_000_000, 0.6
"""Targets of the sample network: rows per second, and share of the hardware's bound. The lower of
the two rates counts."""
MIG_GIB = (5, 10, 20, 40, 80)
RATE = 0.001


@dataclass
class StepFigures:
    """Figures that one step measured."""

    figures: list[Figure] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)


def as_document(step: StepFigures) -> dict[str, Any]:
    """Return the figures as the step's part of the JSON document."""
    return {"figures": step.figures, "skipped": step.skipped, "details": step.details}


def gpu_facts() -> dict[str, Any]:
    """Return name, memory and CUDA version of the GPU, or nothing without a GPU."""
    if DEVICE == "cpu":
        return {}
    found = torch.cuda.get_device_properties(0)
    return {
        "gpu": f"one {found.name}, {found.total_memory / 2**30:.0f} GiB",
        "cuda": torch.version.cuda,
    }


class GpuSizes(NamedTuple):
    """Number and size of the inputs of a step."""

    batch: int
    steps: int
    passes: int
    tables: dict[str, int]

    @classmethod
    def of(cls, is_quick: bool) -> "GpuSizes":
        """Return the sizes of a quick or a full run."""
        if is_quick:
            return cls(QUICK_BATCH, QUICK_STEPS, QUICK_PASSES, QUICK_TABLES)
        return cls(BATCH, STEPS, PASSES, TABLES)


def synchronized() -> float:
    """Wait for the GPU, and return the time in seconds."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds_of(work: Callable[[], object], times: int = 10) -> float:
    """Return the minimum seconds over several runs after a warm-up run."""
    taken = []
    for _ in range(times + 1):
        began = synchronized()
        work()
        taken.append(synchronized() - began)
    return min(taken[1:])


def limits(name: str, *, is_quick: bool) -> StepFigures:
    """Measure the hardware's limits: matrix products, memory, and transfer to the GPU.

    Matrix products are measured at each precision. Memory is measured for sequential access and for
    random rows of a table.
    """
    step, size = StepFigures(), 2**22 if is_quick else 2**30
    side = 512 if is_quick else 8192
    for precision, dtype in (
        ("float32", torch.float32),
        ("tf32", torch.float32),
        ("bfloat16", torch.bfloat16),
    ):
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        rate = products_per_second(dtype, DEVICE, side) / 1e12
        step.figures.append(Figure(f"product of matrices, {precision}", spread([rate]), "TFLOP/s"))
    torch.backends.cuda.matmul.allow_tf32 = False
    source = torch.ones(size, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    copied = 2 * size / seconds_of(lambda: target.copy_(source)) / 1e9
    step.figures.append(Figure("copy in memory, read and written", spread([copied]), "GB/s"))
    step.figures.append(
        Figure(
            "random rows of 192 bytes, read and written", spread([random_rows(is_quick)]), "GB/s"
        )
    )
    if DEVICE == "cuda":
        pinned = torch.ones(size // 4, dtype=torch.uint8).pin_memory()
        sent = size / 4 / seconds_of(lambda: pinned.to(DEVICE, non_blocking=True)) / 1e9
        step.figures.append(Figure("from pinned memory to the GPU", spread([sent]), "GB/s"))
    else:
        step.skipped.append("the way to the GPU: there is no GPU")
    return step


def random_rows(is_quick: bool) -> float:
    """Return the memory speed in GB/s for reads and writes of random rows of a table.

    Each row has a vector and its two moments. The access pattern is the same as in a training step.
    """
    num_rows, taken = (100_000, 10_000) if is_quick else (20_000_000, 1_000_000)
    table = torch.zeros(num_rows, 3, 16, device=DEVICE)
    rows = torch.randperm(num_rows, device=DEVICE)[:taken].sort().values
    return (
        2
        * taken
        * 192
        / seconds_of(lambda: table.index_copy_(0, rows, table.index_select(0, rows)))
        / 1e9
    )


def tests(name: str, *, is_quick: bool) -> StepFigures:
    """Run the tests marked `gpu`."""
    step = StepFigures()
    folders = ["tests/components/training/test_pytorch_engine.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *folders]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    print(done.stdout + done.stderr)
    if "No module named pytest" in done.stderr:
        step.skipped.append("the tests marked gpu: pytest is not installed")
    elif done.returncode:
        raise RuntimeError(f"tests marked gpu failed: {done.stdout[-2000:]}")
    else:
        step.details["summary"] = (summary := done.stdout.strip().splitlines()[-1])
        if " passed" not in summary:
            step.skipped.append(f"the tests marked gpu: {summary}")
        passed = int(summary.split(" passed")[0].split()[-1]) if " passed" in summary else 0
        step.figures.append(Figure("tests marked gpu that passed", spread([passed]), "tests"))
    return step


@contextlib.contextmanager
def initial_weights(config: NetworkConfig, slot_sizes: list[int]) -> Iterator[Path]:
    """Yield a folder with initial weights."""
    with tempfile.TemporaryDirectory(prefix="gpu-") as scratch:
        weights = Path(scratch) / "weights"
        write_initial(weights, config, slot_sizes, click_rate=0.25, seed=1)
        yield weights


def equality(name: str, *, is_quick: bool) -> StepFigures:
    """Compare the scores of GPU and CPU, before and after training on equal rows.

    GPU and CPU start from equal weights.
    """
    step, sizes = StepFigures(), GpuSizes.of(is_quick)
    slot_sizes = slot_sizes_for(sizes.tables["1.2M"])
    planted = PlantedLogit(slot_sizes)
    num_steps, batch = (3, 128) if is_quick else (20, 2048)
    rows, held_out = planted.draw(num_steps * batch, 2)[0], planted.draw(10 * batch, 1)[0]
    for network, config in CONFIGS.items():
        with initial_weights(config, slot_sizes) as weights:
            scores = {}
            for device in dict.fromkeys(("cpu", DEVICE)):
                engine = new_engine(config, slot_sizes, "float32", device=device)
                engine.restore(weights)
                before = engine.score(held_out)
                engine.train(rows, np.arange(len(rows)), batch_size=batch, seed=1)
                scores[device] = before, engine.score(held_out)
                engine.close()
        for at, when in enumerate(("with the same weights", f"after the same {num_steps} steps")):
            worst = float(np.abs(scores["cpu"][at] - scores[DEVICE][at]).max())
            figure = Figure(
                f"{network}, scores {when}, largest difference", spread([worst]), "", "the CPU"
            )
            step.figures.append(figure._replace(target=(1e-5, 1e-3)[at]))
    if DEVICE == "cpu":
        step.skipped.append(
            "equality with the CPU: there is no GPU, so the CPU was compared with itself"
        )
    return step


def new_engine(
    config: NetworkConfig, slot_sizes: list[int], precision: str, *, device: str | None = None
) -> PytorchEngine:
    """Return our engine with zero tables, on `DEVICE` if `device` is None."""
    settings = TrainingSettings(precision=precision, learning_rate=RATE)
    return PytorchEngine(config, slot_sizes, settings, device=device or DEVICE)


def rates(name: str, *, is_quick: bool) -> StepFigures:
    """Measure rows per second of a network on a table.

    The step compares our engine at each precision with plain PyTorch, and with TorchRec if it is
    installed.
    """
    _, network, table = name.split("-")
    step, sizes, config = StepFigures(), GpuSizes.of(is_quick), CONFIGS[network]
    slot_sizes = slot_sizes_for(sizes.tables[table])
    rows = PlantedLogit(slot_sizes).draw(sizes.batch * sizes.steps, 2)[0]
    found, peers = {}, {}
    for peer, make in PEERS.items():
        for precision in ("float32", "bfloat16"):
            try:
                train_pass = make(PeerCase(config, slot_sizes, rows, sizes.batch, precision))
                peers[f"{peer}, {precision}"] = over_passes(train_pass, sizes)
                del train_pass
            except Exception as error:  # report the error, and measure the other peers
                step.skipped.append(f"{peer} in {name}: {type(error).__name__}: {str(error)[:120]}")
            free()
    for precision in PRECISIONS:
        engine = new_engine(config, slot_sizes, precision)
        found[precision] = rate_of_ours(engine, rows, sizes)
        free()
    bytes_a_row = bytes_of_row(rows, sizes.batch)
    case = f"{network}, {table} rows"
    step.figures = rate_figures(case, config, found=found, peers=peers, bytes_a_row=bytes_a_row)
    if name == DEFAULT_RATES:
        by_default = sizes._replace(batch=min(sizes.batch, TrainingSettings().batch_size))
        rate = rate_of_ours(new_engine(config, slot_sizes, "float32"), rows, by_default)
        step.figures.append(
            Figure(f"{case}, float32, batches of {by_default.batch:,} rows", rate, "rows/s")
        )
    step.details = {
        "ours": found,
        "peers": peers,
        "batch": sizes.batch,
        "table_rows": sum(slot_sizes),
    }
    return step


def rate_of_ours(engine: PytorchEngine, rows: Rows, sizes: GpuSizes) -> Spread:
    """Return rows per second of the engine, and close it."""
    try:
        return over_passes(
            lambda number: train(engine, rows, batch=sizes.batch, number=number), sizes
        )
    finally:
        engine.close()


def rate_figures(
    case: str,
    config: NetworkConfig,
    *,
    found: dict[str, Spread],
    peers: dict[str, Spread],
    bytes_a_row: float,
) -> list[Figure]:
    """Return the figures of our engine and of the peers.

    Our figures are compared with the bound of the hardware and with the fastest peer.
    """
    figures, fastest = [], max(peers, key=lambda peer: peers[peer].median, default=None)
    by_memory = random_rows(is_quick=DEVICE == "cpu") * 1e9 / bytes_a_row
    for precision, rate in found.items():
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        by_products = products_per_second(
            dtype, DEVICE, 8192 if DEVICE == "cuda" else 1024
        ) / products_of_row(config)
        bound = min(by_memory, by_products)
        limit = (
            f"{rate.median / bound:.0%} of {short(bound)} by "
            f"{'memory' if bound == by_memory else 'products'}"
        )
        target = min(RATE_TARGET, BOUND_TARGET * bound)
        figures.append(
            Figure(
                f"{case}, {precision}", rate, "rows/s", target=target, is_least=True, limit=limit
            )
        )
        if fastest is not None:
            ratio = Spread(*(value / peers[fastest].median for value in rate))
            figures.append(Figure(f"{case}, {precision}", ratio, peer=fastest))
    torch.backends.cuda.matmul.allow_tf32 = False
    return figures + [Figure(f"{case}, {peer}", rate, "rows/s") for peer, rate in peers.items()]


def bytes_of_row(rows: Rows, batch: int) -> float:
    """Return how many bytes of vectors and moments are read and written per row of a batch.

    Each distinct table row of a batch is read and written once.
    """
    distinct = sum(len(np.unique(rows.ids[:batch, slot])) for slot in range(rows.ids.shape[1]))
    return 2 * 192 * distinct / batch


def over_passes(work: Callable[[int], int], sizes: GpuSizes) -> Spread:
    """Return rows per second over the passes after the first.

    `work` receives the index of the pass, and returns the number of rows.
    """
    taken = []
    for number in range(sizes.passes):
        began = synchronized()
        num_rows = work(number)
        taken.append(num_rows / (synchronized() - began))
    return spread(taken[1:])


def train(engine: PytorchEngine, rows: Rows, *, batch: int, number: int) -> int:
    """Train our engine for one pass over the rows in random order."""
    engine.train(
        rows, np.random.default_rng(number).permutation(len(rows)), batch_size=batch, seed=number
    )
    return len(rows)


def free() -> None:
    """Release unused memory of the GPU."""
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


class PeerCase(NamedTuple):
    """Training task of a peer."""

    config: NetworkConfig
    slot_sizes: list[int]
    rows: Rows
    batch: int
    precision: str


Peer = Callable[[PeerCase], Callable[[int], int]]
"""Function that prepares a peer and returns a function for one pass. The function for one pass
receives the index of the pass, and returns the number of rows."""


def pinned(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Return dense values, ids and labels in pinned memory."""
    found = (rows.dense, rows.ids.astype(np.int64), rows.labels)
    tensors = [torch.from_numpy(np.ascontiguousarray(each)) for each in found]
    dense, ids, labels = (each.pin_memory() if DEVICE == "cuda" else each for each in tensors)
    return dense, ids, labels


def trained(
    case: PeerCase, logits: Callable[[Tensor, Tensor], Tensor], step: Callable[[Tensor], None]
) -> Callable[[int], int]:
    """Run one pass: compute `logits` and the mean loss, and call `step`.

    `step` does the backward pass and the update.
    """
    of_rows = pinned(case.rows)
    loss_of = torch.nn.functional.binary_cross_entropy_with_logits

    def train_pass(number: int) -> int:
        for parts in zip(*(each.split(case.batch) for each in of_rows)):
            dense, ids, labels = (part.to(DEVICE, non_blocking=True) for part in parts)
            with torch.autocast(DEVICE, torch.bfloat16, enabled=case.precision == "bfloat16"):
                found = logits(dense, ids)
            step(loss_of(found.float(), labels))
        return len(case.rows)

    return train_pass


def plain(*, is_sparse: bool) -> Peer:
    """Train with one `nn.EmbeddingBag` per column, and torch.optim.Adam.

    With sparse gradients, the optimizer of the tables is SparseAdam.
    """

    def make(case: PeerCase) -> Callable[[int], int]:
        with torch.device(DEVICE):
            model = PlainNetwork(
                build_network(case.config), case.slot_sizes, WIDTH, is_sparse=is_sparse
            ).to(DEVICE)
        tables, dense = list(model.bags.parameters()), list(model.network.parameters())
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Adam(dense if is_sparse else dense + tables, RATE)
        ]
        optimizers += [torch.optim.SparseAdam(tables, RATE)] if is_sparse else []

        def step(loss: Tensor) -> None:
            model.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()

        return trained(case, model, step)

    return make


def torchrec(case: PeerCase) -> Callable[[int], int]:
    """Train with TorchRec's fused embedding bags, which run Adam in the backward pass."""
    from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

    names = list(CRITEO.slots)
    tables = [
        EmbeddingBagConfig(
            name=name, embedding_dim=WIDTH, num_embeddings=size, feature_names=[name]
        )
        for name, size in zip(names, case.slot_sizes)
    ]
    bags = FusedEmbeddingBagCollection(
        tables, torch.optim.Adam, {"lr": RATE}, device=torch.device(DEVICE)
    )
    network = build_network(case.config).to(DEVICE)
    optimizer = torch.optim.Adam(network.parameters(), RATE)

    def logits(dense: Tensor, ids: Tensor) -> Tensor:
        lengths = torch.ones(ids.numel(), dtype=torch.int32, device=ids.device)
        found = bags(KeyedJaggedTensor(names, ids.t().reshape(-1), lengths=lengths))
        outputs: Tensor = network(dense, found.values().view(len(ids), len(names), -1))
        return outputs

    def step(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return trained(case, logits, step)


PEERS: dict[str, Peer] = {
    "plain PyTorch": plain(is_sparse=False),
    "plain PyTorch, sparse gradients": plain(is_sparse=True),
    "TorchRec": torchrec,
}


def graphs(name: str, *, is_quick: bool) -> StepFigures:
    """Measure a network's forward and backward pass: eager, as a CUDA graph, and compiled.

    The measurement is an experiment, because the product only trains eagerly. The product does not
    use CUDA graphs or compilation. Compilation takes up to a minute, so only the smaller batch is
    compiled. With this batch, a GPU mostly waits for its kernels to be started.
    """
    _, network = name.split("-")
    step, sizes, config = StepFigures(), GpuSizes.of(is_quick), CONFIGS[network]
    batches = (sizes.batch,) if is_quick else (TrainingSettings().batch_size, sizes.batch)
    for batch in batches:
        usual = None
        for way, make in WAYS.items():
            if way == "compiled" and batch != batches[0]:
                continue
            case = f"{network}, forward and backward of {batch:,} rows, {way}"
            try:
                taken = 1e3 * seconds_of(passes_of(config, batch, make), 3 if is_quick else 20)
            except Exception as error:  # report the error, and measure the other variants
                step.skipped.append(f"{case}: {type(error).__name__}: {str(error).strip()[:100]}")
                continue
            usual = usual or taken
            ratio = Figure(case, spread([usual / taken]), peer="as it is")
            step.figures += [
                Figure(case, spread([taken]), "ms"),
                *([ratio] if way != "as it is" else []),
            ]
    try:
        step.figures.append(rate_with_graph(network, sizes))
    except (NotImplementedError, RuntimeError) as error:
        step.skipped.append(
            f"{network}, training with a CUDA graph: {type(error).__name__}: {error}"[:160]
        )
    return step


def rate_with_graph(network: str, sizes: GpuSizes) -> Figure:
    """Return rows per second of our engine if its network is a CUDA graph."""
    config, slot_sizes = CONFIGS[network], slot_sizes_for(sizes.tables["1.2M"])
    rows = PlantedLogit(slot_sizes).draw(sizes.batch * sizes.steps, 2)[0]
    engine = new_engine(config, slot_sizes, "tf32")
    engine._network = graphed(engine._network.train(), sample_of(sizes.batch))
    rate = rate_of_ours(engine, rows, sizes)
    return Figure(f"{network}, 1.2M rows, tf32, the network as CUDA graph", rate, "rows/s")


def sample_of(batch: int) -> tuple[Tensor, Tensor]:
    """Return the inputs of a batch for the sample networks."""
    dense = torch.randn(batch, NUM_DENSE, device=DEVICE)
    return dense, torch.randn(batch, NUM_CATEGORICAL, WIDTH, device=DEVICE, requires_grad=True)


def passes_of(config: NetworkConfig, batch: int, make: Callable[..., Any]) -> Callable[[], object]:
    """Return a function that runs the forward and backward pass of the network.

    `make` converts the network before the first pass.
    """
    dense, vectors = sample_of(batch)
    model = build_network(config).to(DEVICE)
    parameters = list(model.parameters())
    changed = make(model, (dense, vectors))

    def work() -> object:
        return torch.autograd.grad(changed(dense, vectors).sum(), [vectors, *parameters])

    return work


def graphed(model: Any, sample: tuple[Tensor, ...]) -> Any:
    """Return the model as a CUDA graph."""
    if DEVICE == "cpu":
        raise NotImplementedError("there is no GPU")
    return torch.cuda.make_graphed_callables(model, sample)


WAYS: dict[str, Callable[..., Any]] = {
    "as it is": lambda model, sample: model,
    "CUDA graph": graphed,
    "compiled": lambda model, sample: torch.compile(model, mode="reduce-overhead"),
}


def loading(name: str, *, is_quick: bool) -> StepFigures:
    """Measure how many rows per second arrive in GPU memory.

    Our loader runs with several threads, and torch's DataLoader with several processes.
    """
    from torch.utils.data import DataLoader, TensorDataset

    step, sizes = StepFigures(), GpuSizes.of(is_quick)
    slot_sizes = slot_sizes_for(sizes.tables["10M"])
    rows = PlantedLogit(slot_sizes).draw(sizes.batch * sizes.steps, 2)[0]
    engine, order = (
        new_engine(CONFIGS["dcn"], slot_sizes, "float32"),
        np.random.default_rng(0).permutation(len(rows)),
    )
    parts = [order[at : at + sizes.batch] for at in range(0, len(order), sizes.batch)]
    for threads in (1, 2) if is_quick else (1, 2, 4, 8, 16):

        def sent(number: int, threads: int = threads) -> int:
            with ThreadPoolExecutor(threads) as pool:
                for _ in pool.map(
                    lambda part: assemble(rows, part, engine._positions, device=DEVICE), parts
                ):
                    pass
            return len(rows)

        rate = over_passes(sent, sizes)
        step.figures.append(
            Figure(f"batches gathered by {threads} threads, sorted on the device", rate, "rows/s")
        )
    data = TensorDataset(
        *(
            torch.from_numpy(np.ascontiguousarray(each))
            for each in (rows.dense, rows.ids, rows.labels)
        )
    )
    for workers in (0, 2) if is_quick else (0, 4, 8, 16):
        loader = DataLoader(
            data,
            batch_size=None,
            sampler=[torch.from_numpy(part) for part in parts],  # type: ignore[arg-type]
            num_workers=workers,
            pin_memory=DEVICE == "cuda",
            persistent_workers=workers > 0,
        )

        def loaded(number: int, loader: Any = loader) -> int:
            return sum(
                len([each.to(DEVICE, non_blocking=True) for each in batch][-1]) for batch in loader
            )

        rate = over_passes(loaded, sizes)
        step.figures.append(
            Figure(f"batches by a DataLoader of {workers} processes", rate, "rows/s")
        )
    return step


def estimate(config: NetworkConfig, table_rows: int, batch: int) -> int:
    """Return an estimate of the bytes that a fit needs.

    A fit needs memory for the vectors and dense weights with two moments each, and for the batch.
    The batch needs memory for its vectors, with their gradients and new values, and for every
    activation with its gradient. Three prefetched batches and the buffers of the sort need memory
    too.
    """
    width = config.embedding_dim
    dense = sum(each.numel() for each in build_network(config).parameters())
    of_row = 10 * config.num_categorical * width + 2 * (
        4 * config.input_width + 2 * sum(config.tower)
    )
    ahead = 3 * (config.num_categorical * 6 + config.num_dense) + 10 * config.num_categorical
    return 4 * (3 * table_rows * width + 4 * dense + batch * (of_row + ahead))


def memory(name: str, *, is_quick: bool) -> StepFigures:
    """Compare the peak memory with the estimate, and find the smallest sufficient MIG slice."""
    step, sizes = StepFigures(), GpuSizes.of(is_quick)
    for network, config in CONFIGS.items():
        for table, table_rows in sizes.tables.items():
            expected, case = estimate(config, table_rows, sizes.batch), f"{network}, {table} rows"
            fits = next(
                (f"{gib} GiB" for gib in MIG_GIB if expected < 0.9 * gib * 2**30), "no MIG size"
            )
            estimated = Figure(
                f"{case}, memory by estimate",
                spread([expected / 2**30]),
                "GiB",
                limit=f"fits {fits}",
            )
            step.figures.append(estimated)
            if DEVICE == "cpu":
                continue
            slot_sizes = slot_sizes_for(table_rows)
            rows = PlantedLogit(slot_sizes).draw(sizes.batch * 3, 2)[0]
            free()
            engine = new_engine(config, slot_sizes, "float32")
            train(engine, rows, batch=sizes.batch, number=0)
            peak = torch.cuda.max_memory_allocated()
            step.figures += [
                Figure(f"{case}, memory at most", spread([peak / 2**30]), "GiB"),
                Figure(
                    f"{case}, memory at most",
                    spread([peak / expected]),
                    peer="the estimate",
                    target=1.0,
                ),
            ]
            engine.close()
            del engine
    if DEVICE == "cpu":
        step.skipped.append("peak memory beside its estimate: there is no GPU")
    return step


def serving(name: str, *, is_quick: bool) -> StepFigures:
    """Measure the served graph in ONNX Runtime with the CUDA provider and with the CPU provider.

    The figures are the response times in milliseconds, and the largest difference between the
    scores of both providers.
    """
    step = StepFigures()
    try:
        import onnxruntime

        from benchmarks.lists import MODELS, TimedGraph
    except ImportError as error:
        step.skipped.append(f"the served graph: {error}")
        return step
    has_gpu = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    if not has_gpu:
        step.skipped.append(
            "the served graph by ONNX Runtime's CUDA provider: onnxruntime-gpu is not installed"
        )
    seconds = 0.05 if is_quick else 2.0
    with tempfile.TemporaryDirectory(prefix="gpu-") as scratch:
        ways = {
            way: TimedGraph(
                MODELS["columns"], Path(scratch) / way, provider=f"{way}ExecutionProvider"
            )
            for way in ("CPU", *["CUDA"] * has_gpu)
        }
        for num_rows in (1, 64) if is_quick else (1, 16, 64, 256, 1024, 4096):
            case = f"served graph, {num_rows:,} rows"
            taken = {way: graph.response_ms(num_rows, seconds) for way, graph in ways.items()}
            step.figures += [
                Figure(f"{case}, {way}", spread([value]), "ms") for way, value in taken.items()
            ]
            if has_gpu:
                scores = [graph.score(num_rows) for graph in ways.values()]
                worst = float(np.abs(scores[0] - scores[1]).max())
                step.figures.append(
                    Figure(f"{case}, largest difference", spread([worst]), "", "the CPU", 1e-5)
                )
    return step
