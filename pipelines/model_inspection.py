"""What is in one stored model: its tables slot by slot, its dense parameters, its optimizer state, and its hashes.

`evergreen model inspect` prints the answer (`pipelines.model_report`). Reads the table in chunks, so a model need not
fit into memory; judges nothing but hashes and numbers that are not finite.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from components.contracts.criteo import CATEGORICAL, NUM_CATEGORICAL
from components.contracts.dcn import DcnConfig
from components.contracts.graph_reader import read_graph
from components.contracts.manifests import Model
from components.contracts.model_files import GRAPH_FILE, Moments, RowChunk, StoredModel, open_model
from components.contracts.sparse_files import slots_of
from components.contracts.workflow import FeatureWorkflow
from components.runtime.durable import sha256_tree
from components.runtime.errors import ContractError


@dataclass(frozen=True, kw_only=True)
class SlotFigures:
    """One slot's rows. A norm is the L2 norm of a row, of rows with finite values only; None = there is no such row."""

    column: str
    num_ids: int
    num_rows: int
    """Ids that have a row in the files; the others were never trained, and have a zero vector."""
    num_tombstones: int | None
    """Ids without a category; None = no workflow lies beside the weights."""
    num_zero_rows: int
    num_not_finite: int
    """Rows with a NaN or an infinite value in the vector or its state."""
    mean_norm: float | None
    max_norm: float | None
    mean_moment_norms: tuple[float, float] | None
    """Of Adam's m and v."""


@dataclass(frozen=True, kw_only=True)
class ArrayFigures:
    """One dense parameter, or one of Adam's two moments of all of them; None = no value is finite."""

    name: str
    shape: tuple[int, ...]
    norm: float | None
    minimum: float | None
    maximum: float | None
    num_not_finite: int


@dataclass(frozen=True, kw_only=True)
class PartHash:
    """SHA-256 of one part of the folder; `promised` is the manifest's, None without one."""

    part: str
    found: str | None
    """None = the part is absent."""
    promised: str | None

    @property
    def differs(self) -> bool:
        """Whether the manifest promises other contents."""
        return self.promised is not None and self.found != self.promised


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """All that is printed of one model."""

    folder: Path
    config: DcnConfig
    manifest: Model | None
    """None for a bare weights folder."""
    slots: list[SlotFigures]
    dense: list[ArrayFigures]
    dense_moments: list[ArrayFigures]
    """m and v; empty = no state was kept."""
    hashes: list[PartHash] = field(default_factory=list)
    has_table_moments: bool = False
    """Whether the table's optimizer state was kept."""
    misfits: list[str] = field(default_factory=list)
    """Why a part is not what the manifest says: weights or workflow that cannot be read, optimizer state of no rows, a
    graph JSON of another network. What such a part would tell is missing here."""

    @property
    def faults(self) -> list[str]:
        """One sentence for each hash that differs, each kind of number that is not finite, and what cannot be read."""
        faults = [
            f"{h.part} has sha256 {h.found}, expected {h.promised} as in the manifest" for h in self.hashes if h.differs
        ]
        if rows := sum(slot.num_not_finite for slot in self.slots):
            faults.append(f"{rows} rows of the table hold numbers that are not finite")
        for array in [*self.dense, *self.dense_moments]:
            if array.num_not_finite:
                faults.append(f"{array.name} holds {array.num_not_finite} numbers that are not finite")
        return faults + self.misfits


def inspect_model(folder: Path, config_path: Path | None = None) -> Inspection:
    """The figures of the model in `folder`.

    Args:
        folder: A folder of the model store, which holds `model.json`; or a bare weights folder.
        config_path: For a bare weights folder: JSON with `config` and `slot_sizes`, as every `model.json` has them.

    Raises:
        ContractError: the folder is neither, or its files do not fit the model that they should hold.
    """
    if config_path is not None:
        config, slot_sizes = _shape(config_path)
        return _figures(folder, open_model(folder, config, slot_sizes), slot_sizes, None, {Model.WEIGHTS: folder})
    if not (folder / Model.MANIFEST).exists():
        raise ContractError(_no_model(folder))
    manifest = Model.read(folder / Model.MANIFEST)
    config = DcnConfig.from_document(manifest.config)
    parts = {part: folder / part for part in manifest.sha256}
    try:
        stored = open_model(folder / Model.WEIGHTS, config, manifest.slot_sizes)
    except ContractError as error:
        # A damaged model is a finding like any other, and its hashes tell which parts are whole.
        return Inspection(
            folder=folder,
            config=config,
            manifest=manifest,
            slots=[],
            dense=[],
            dense_moments=[],
            hashes=_hashes(parts, manifest),
            misfits=[str(error)],
        )
    return _figures(folder, stored, manifest.slot_sizes, manifest, parts)


def _no_model(folder: Path) -> str:
    """What is wrong with a folder that is no model's, and where one is."""
    expected = "expected a folder of the model store, or a bare weights folder and --config with its shape"
    if not folder.exists():
        return f"{folder} does not exist, {expected}"
    near = [folder.parent, *sorted([*folder.glob("*/"), *folder.glob("models/*/")], reverse=True)]
    hint = next((f"; {place} is one" for place in near if (place / Model.MANIFEST).exists()), "")
    return f"{folder} has no {Model.MANIFEST}, {expected}{hint}"


def _shape(path: Path) -> tuple[DcnConfig, list[int]]:
    try:
        document = json.loads(path.read_text())
        config, slot_sizes = DcnConfig.from_document(document["config"]), [int(n) for n in document["slot_sizes"]]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ContractError(
            f"{path} cannot be read as JSON with `config` and `slot_sizes`: {type(error).__name__}: {error}"
        ) from error
    if len(slot_sizes) != NUM_CATEGORICAL:
        raise ContractError(f"{path} has {len(slot_sizes)} slot sizes, expected {NUM_CATEGORICAL}")
    return config, slot_sizes


def _figures(
    folder: Path,
    stored: StoredModel,
    slot_sizes: list[int],
    manifest: Model | None,
    parts: dict[str, Path],
) -> Inspection:
    sums = _SlotSums(slot_sizes)
    with_moments = stored.has_embedding_moments and not stored.rows.state_fault
    for chunk in stored.chunks(moments=with_moments):
        sums.add(chunk)
    tombstones, workflow_fault = _tombstones(parts.get(Model.WORKFLOW))
    misfits = stored.rows.state_fault, workflow_fault, _graph_fault(stored.folder / GRAPH_FILE, stored.config)
    return Inspection(
        folder=folder,
        config=stored.config,
        manifest=manifest,
        slots=sums.figures(tombstones, with_moments),
        dense=[_array(name, values) for name, values in stored.dense().items()],
        dense_moments=_dense_moments(stored.dense_moments()),
        hashes=_hashes(parts, manifest),
        has_table_moments=stored.has_embedding_moments,
        misfits=[fault for fault in misfits if fault],
    )


def _tombstones(workflow: Path | None) -> tuple[list[int] | None, str | None]:
    """Ids without a category per slot, where there is a workflow; and why it cannot be read."""
    if workflow is None or not workflow.exists():
        return None, None
    try:
        return FeatureWorkflow.load(workflow).tombstones, None
    except ContractError as error:
        return None, str(error)


def _hashes(parts: dict[str, Path], manifest: Model | None) -> list[PartHash]:
    promised = manifest.sha256 if manifest else {}
    return [
        PartHash(part=part, found=sha256_tree(path) if path.exists() else None, promised=promised.get(part))
        for part, path in parts.items()
    ]


def _graph_fault(path: Path, config: DcnConfig) -> str | None:
    if not path.exists():
        return None
    try:
        found = read_graph(path, projection_dim=config.projection_dim).config
    except ContractError as error:
        return str(error)
    return None if found == config else f"graph {path} is of {found}, expected {config}"


def _dense_moments(moments: Moments | None) -> list[ArrayFigures]:
    return [_array(f"dense Adam {name}", moment) for name, moment in zip("mv", moments or ())]


def _array(name: str, values: NDArray[np.float32]) -> ArrayFigures:
    finite = values[np.isfinite(values)].astype(np.float64)
    there_are = finite.size > 0
    return ArrayFigures(
        name=name,
        shape=values.shape,
        norm=float(np.sqrt((finite**2).sum())) if there_are else None,
        minimum=float(finite.min()) if there_are else None,
        maximum=float(finite.max()) if there_are else None,
        num_not_finite=values.size - finite.size,
    )


class _SlotSums:
    """Sums over the rows seen so far, each [26]."""

    def __init__(self, slot_sizes: list[int]) -> None:
        self._slot_sizes = slot_sizes
        self._rows, self._zero, self._not_finite = (np.zeros(len(slot_sizes), np.int64) for _ in range(3))
        self._norm, self._max, self._first, self._second = (np.zeros(len(slot_sizes)) for _ in range(4))

    def add(self, chunk: RowChunk) -> None:
        """Counts the rows of one chunk."""
        slots = slots_of(chunk.keys, self._slot_sizes)
        norms = [_norms(array) for array in (chunk.vectors, *(chunk.moments or ()))]
        finite = np.isfinite(np.sum(norms, axis=0))
        self._rows += self._count(slots)
        self._not_finite += self._count(slots[~finite])
        self._zero += self._count(slots[norms[0] == 0])
        for total, norm in zip((self._norm, self._first, self._second), norms):
            total += np.bincount(slots[finite], norm[finite], minlength=len(total))
        np.maximum.at(self._max, slots[finite], norms[0][finite])

    def _count(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.bincount(slots, minlength=len(self._slot_sizes))

    def figures(self, tombstones: list[int] | None, with_moments: bool) -> list[SlotFigures]:
        """The slots in column order."""
        return [self._slot(i, tombstones, with_moments) for i in range(len(self._slot_sizes))]

    def _slot(self, i: int, tombstones: list[int] | None, with_moments: bool) -> SlotFigures:
        finite = int(self._rows[i] - self._not_finite[i])
        moments = None
        if with_moments and finite:
            moments = (float(self._first[i]) / finite, float(self._second[i]) / finite)
        return SlotFigures(
            column=CATEGORICAL[i],
            num_ids=self._slot_sizes[i],
            num_rows=int(self._rows[i]),
            num_tombstones=tombstones[i] if tombstones else None,
            num_zero_rows=int(self._zero[i]),
            num_not_finite=int(self._not_finite[i]),
            mean_norm=float(self._norm[i]) / finite if finite else None,
            max_norm=float(self._max[i]) if finite else None,
            mean_moment_norms=moments,
        )


def _norms(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """L2 norm of each row in float64: squares of large float32 values overflow in their own type."""
    norms: NDArray[np.float64] = np.linalg.norm(rows.astype(np.float64), axis=1)
    return norms
