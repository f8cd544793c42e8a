"""Run one case of the speed benchmark: a network on a table, in interleaved rounds.

In a round, our engine and each peer train on the same rows, one after another, in an order that
changes per round. A ratio compares two measurements of the same round, so that a busy moment of the
machine affects both. The first round is a warm-up and is not measured. At the end, all engines have
trained on the same rows with the same batch size, and score the same held-out rows.
"""

import gc
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.encoded_rows import PlantedLogit, slot_sizes_for
from benchmarks.peers import (
    OTHER_OPTIMIZERS,
    TORCHREC,
    DeepCtr,
    Evergreen,
    PlainPytorch,
    TorchrecExample,
    Trainer,
)
from benchmarks.spread import spread
from components.training.rows import Rows
from components.training.start import write_initial
from evergreen.config.features import Features
from evergreen.config.model import DcnConfig, DeepFmConfig, NetworkConfig
from evergreen.contracts.criteo import CRITEO
from evergreen.networks.network import build_network
from evergreen.statistics.metrics import roc_auc

PRECISIONS = ("float32", "bfloat16")
_HELD_OUT_ROWS = 100_000
_CLICK_RATE = 0.25
_MOST_DIFFERENCE = 2.5e-6
"""Maximum difference between two probabilities of networks with the same weights. At the steepest
point of the sigmoid, the maximum corresponds to a difference of 1e-5 between logits."""


class NetworksDiffer(Exception):
    """A peer and our network have equal weights but different scores.

    A ratio of their speeds is therefore meaningless.
    """


@dataclass(frozen=True, kw_only=True)
class Case:
    """Network of a measurement, and size of its embedding table."""

    name: str
    config: NetworkConfig
    features: Features
    table_rows: int
    rounds: int
    """Number of rounds including the warm-up."""
    steps: int
    """Optimizer steps per round."""


def measure(case: Case, batch_size: int, scratch: Path) -> dict[str, Any]:
    """Return the figures of the case: rows/s, ratio to the fastest peer and AUC.

    Only a peer that trains with Adam, like our engine, can be the fastest peer.

    Raises:
        NetworksDiffer: our engine and plain PyTorch give different scores with the same weights.
    """
    slot_sizes = slot_sizes_for(case.table_rows)
    planted = PlantedLogit(slot_sizes, features=case.features)
    segments = [
        planted.draw(case.steps * batch_size, seed)[0] for seed in range(2, 2 + case.rounds)
    ]
    held_out, true_logits = planted.draw(_HELD_OUT_ROWS, seed=1)
    ours, peers = _trainers(case, slot_sizes, batch_size, scratch=scratch)
    _check_same_network(ours[0], peers[0], held_out[:4096])

    speeds: dict[str, list[float]] = {c.name: [] for c in [*ours, *peers]}
    for number, rows in enumerate(segments):
        turn = [*ours, *peers]
        for trainer in turn[number % len(turn) :] + turn[: number % len(turn)]:
            speeds[trainer.name].append(_rows_per_second(trainer, rows))
    aucs = {c.name: roc_auc(held_out.labels, c.score(held_out)) for c in [*ours, *peers]}
    names = [c.name for c in ours], [c.name for c in peers]
    result = _figures(
        case, *names, speeds={name: values[1:] for name, values in speeds.items()}, aucs=aucs
    )
    for trainer in ours:
        figures = result["trainers"][trainer.name]
        bound = products_per_second(torch.bfloat16 if "bfloat16" in trainer.name else torch.float32)
        figures["product_share"] = (
            figures["rows_per_second"].median * products_of_row(case.config) / bound
        )
    result["left_out"] = left_out(case.config, case.features)
    result["best_possible_auc"] = roc_auc(held_out.labels, true_logits)
    result["rows"] = case.rounds * case.steps * batch_size
    result["rounds"], result["steps"] = case.rounds - 1, case.steps
    del ours, peers, turn, trainer
    gc.collect()
    return result


def products_of_row(config: NetworkConfig) -> int:
    """Return the floating-point operations of a row's products with dense weights.

    The backward pass is counted as two forward passes.
    """
    sizes = [each.numel() for each in build_network(config).parameters() if each.ndim > 1]
    return 6 * sum(sizes)


def products_per_second(dtype: torch.dtype, device: str = "cpu", side: int = 2048) -> float:
    """Return torch's operations per second in products of square matrices on this device."""
    a, b = torch.randn(2, side, side, device=device, dtype=torch.float32).to(dtype).unbind()
    durations = []
    for _ in range(6):
        if device != "cpu":
            torch.cuda.synchronize()
        began = time.perf_counter()
        a @ b
        if device != "cpu":
            torch.cuda.synchronize()
        durations.append(time.perf_counter() - began)
    return 2 * side**3 / min(durations)


def _trainers(
    case: Case, slot_sizes: list[int], batch_size: int, *, scratch: Path
) -> tuple[list[Evergreen], list[Trainer]]:
    weights, config, features = scratch / "weights", case.config, case.features
    write_initial(weights, config, slot_sizes, click_rate=_CLICK_RATE, seed=1)
    ours = [
        Evergreen(
            config,
            slot_sizes,
            weights,
            batch_size=batch_size,
            precision=precision,
            features=features,
        )
        for precision in PRECISIONS
    ]
    own = {"batch_size": batch_size, "features": features}
    peers: list[Trainer] = [
        PlainPytorch(config, slot_sizes, weights, is_sparse=is_sparse, **own)
        for is_sparse in (False, True)
    ]
    absent = left_out(config, features)
    if isinstance(config, (DcnConfig, DeepFmConfig)) and DeepCtr.name not in absent:
        peers.append(DeepCtr(config, slot_sizes, batch_size, features=features))
    if TORCHREC not in absent:
        peers += [
            TorchrecExample(config, slot_sizes, batch_size=batch_size, is_fused=is_fused)
            for is_fused in (False, True)
        ]
    return ours, peers


def left_out(config: NetworkConfig, features: Features) -> dict[str, str]:
    """Return the peers that do not train this case, each with the reason."""
    reasons = {}
    if find_spec("deepctr_torch") is None:
        reasons[DeepCtr.name] = "deepctr-torch is not installed"
    elif not isinstance(config, (DcnConfig, DeepFmConfig)):
        reasons[DeepCtr.name] = f"it has no {config.network}"
    if find_spec("torchrec") is None:
        reasons[TORCHREC] = "torchrec is not installed"
    elif features != CRITEO:
        reasons[TORCHREC] = "its example has no lists"
    return reasons


def _check_same_network(ours: Trainer, peer: Trainer, rows: Rows) -> None:
    difference = float(np.abs(ours.score(rows) - peer.score(rows)).max())
    if not difference <= _MOST_DIFFERENCE:
        raise NetworksDiffer(
            f"{ours.name} and {peer.name} differ by {difference:.2g} on {len(rows)} rows with the "
            "same weights, "
            f"expected at most {_MOST_DIFFERENCE}"
        )


def _rows_per_second(trainer: Trainer, rows: Rows) -> float:
    prepared = trainer.prepare(rows)
    began = time.perf_counter()
    trainer.train(prepared)
    return len(rows) / (time.perf_counter() - began)


def _figures(
    case: Case,
    ours: list[str],
    peers: list[str],
    *,
    speeds: dict[str, list[float]],
    aucs: dict[str, float | None],
) -> dict[str, Any]:
    same_task = [name for name in peers if name not in OTHER_OPTIMIZERS]
    faster = max(same_task, key=lambda name: spread(speeds[name]).median)
    better = max(aucs[name] or 0.0 for name in same_task)
    trainers = {
        name: {
            "rows_per_second": spread(speeds[name]),
            "ratio": spread([a / b for a, b in zip(speeds[name], speeds[faster])]),
            "auc": aucs[name],
            "auc_difference": (aucs[name] or 0.0) - better,
        }
        for name in [*ours, *peers]
    }
    others = {
        name: {
            other: spread([a / b for a, b in zip(speeds[name], speeds[other])])
            for other in peers
            if other in OTHER_OPTIMIZERS
        }
        for name in ours
    }
    return {
        "case": case.name,
        "faster_peer": faster,
        "ours": ours,
        "trainers": trainers,
        "ratios_to_other_optimizers": others,
    }
