"""What is in one stored model, as lines for a terminal: `evergreen model inspect`.

Figures of the table slot by slot, of the dense parameters and of the optimizer state, and the hashes of all parts.
Reads the table in pieces, so a model need not fit into memory; judges nothing but hashes and numbers that are not
finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from components.contracts.criteo import CATEGORICAL
from components.contracts.manifests import Model
from components.contracts.workflow import FeatureWorkflow
from components.models.configs import config_from_document
from components.models.files import FloatArray, StoredModel, chunks, open_model, slot_offsets
from components.runtime.durable import sha256_tree
from components.runtime.errors import ContractError

PARTS = ("weights", "Adam m", "Adam v")


@dataclass(frozen=True, kw_only=True)
class SlotFigures:
    """One slot's rows. A norm is the L2 norm of a row, of rows with finite values only; None = there is no such row."""

    column: str
    num_ids: int
    num_tombstones: int | None
    """Ids without a category; None = the workflow cannot be read."""
    num_zero_rows: int
    num_not_finite: int
    """Rows with a NaN or an infinite value in the vector or its state."""
    max_norm: float | None
    mean_norms: tuple[float, ...]
    """Of the vectors, and of Adam's m and v where they were kept."""


@dataclass(frozen=True, kw_only=True)
class ArrayFigures:
    """One dense parameter, or one of its moments; None = no value is finite."""

    name: str
    shape: tuple[int, ...]
    norm: float | None
    minimum: float | None
    maximum: float | None
    num_not_finite: int


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """All that is printed of one model."""

    folder: Path
    manifest: Model
    hashes: dict[str, str | None]
    """SHA-256 found of each part that the manifest names; None = the part is absent."""
    slots: list[SlotFigures]
    dense: list[ArrayFigures]
    has_moments: bool
    misfits: list[str]
    """Why weights or workflow cannot be read; their figures are missing here."""

    @property
    def faults(self) -> list[str]:
        """One sentence for each hash that differs, each kind of number that is not finite, and what cannot be read."""
        faults = [
            f"{part} has sha256 {found}, expected {self.manifest.sha256[part]} as in the manifest"
            for part, found in self.hashes.items()
            if found != self.manifest.sha256[part]
        ]
        if rows := sum(slot.num_not_finite for slot in self.slots):
            faults.append(f"{rows} rows of the table hold numbers that are not finite")
        for array in self.dense:
            if array.num_not_finite:
                faults.append(f"{array.name} holds {array.num_not_finite} numbers that are not finite")
        return faults + self.misfits


def inspect_model(folder: Path) -> Inspection:
    """The figures of the model in `folder`, a folder of the model store.

    A damaged model is a finding like any other, and its hashes tell which parts are whole.

    Raises:
        ContractError: the folder has no manifest.
    """
    if not (folder / Model.MANIFEST).exists():
        raise ContractError(_missing_manifest(folder))
    manifest = Model.read(folder / Model.MANIFEST)
    misfits: list[str] = []
    tombstones: list[int] | None = None
    stored: StoredModel | None = None
    try:
        tombstones = FeatureWorkflow.load(folder / Model.WORKFLOW).tombstones
    except ContractError as error:
        misfits.append(str(error))
    try:
        stored = open_model(folder / Model.WEIGHTS, manifest.slot_sizes)
    except ContractError as error:
        misfits.append(str(error))
    return Inspection(
        folder=folder,
        manifest=manifest,
        hashes={p: sha256_tree(folder / p) if (folder / p).exists() else None for p in manifest.sha256},
        slots=_slots(stored, manifest.slot_sizes, tombstones) if stored else [],
        dense=_dense(stored) if stored else [],
        has_moments=stored is not None and stored.moments is not None,
        misfits=misfits,
    )


def print_inspection(folder: Path) -> int:
    """Prints the model's figures; 0, or 1 where it has faults, such as a hash that differs from the manifest's."""
    inspection = inspect_model(folder)
    for line in report(inspection):
        print(line)
    return 1 if inspection.faults else 0


def report(inspection: Inspection) -> Iterator[str]:
    """The lines of the report."""
    manifest = inspection.manifest
    settings = config_from_document(manifest.config).as_document()
    network = settings.pop("network")
    yield f"folder   {inspection.folder}"
    yield (
        f"model    {manifest.model_id} of backend {manifest.backend}, parent {manifest.parent_model_id or 'none'}, "
        f"seed {manifest.seed}"
    )
    yield f"rows     {manifest.num_train_rows:,} up to {manifest.last_event_time}, created {manifest.created_at}"
    yield f"steps    {manifest.optimizer_step:,} of the optimizer, over all rounds"
    yield f"network  {network}: " + ", ".join(f"{name} {value}" for name, value in settings.items())
    for part, found in inspection.hashes.items():
        yield f"sha256   {part} {found or 'absent'}, {'as' if found == manifest.sha256[part] else 'not as'} promised"
    if inspection.slots:
        yield ""
        yield from _columns([_SLOT_HEAD, *map(_slot_cells, inspection.slots)])
        yield ""
        yield from _columns([("dense", "shape", "norm", "min", "max", "not finite"), *map(_cells, inspection.dense)])
        if not inspection.has_moments:
            yield "no optimizer state was kept"
    for fault in inspection.faults:
        yield f"FAULT    {fault}"


def _missing_manifest(folder: Path) -> str:
    """What is wrong with a folder that is no model's, and where one is."""
    if not folder.exists():
        return f"{folder} does not exist, expected a folder of the model store"
    near = [folder.parent, *sorted([*folder.glob("*/"), *folder.glob("models/*/")], reverse=True)]
    hint = next((f"; {place} is one" for place in near if (place / Model.MANIFEST).exists()), "")
    return f"{folder} has no {Model.MANIFEST}, expected a folder of the model store{hint}"


def _slots(stored: StoredModel, slot_sizes: list[int], tombstones: list[int] | None) -> list[SlotFigures]:
    figures = []
    for slot, (offset, size) in enumerate(zip(slot_offsets(slot_sizes).tolist(), slot_sizes)):
        norms = np.concatenate([_norms(stored, part) for part in chunks(offset, offset + size)], axis=1)
        finite = norms[:, np.isfinite(norms).all(axis=0)]
        there_are = finite.shape[1] > 0
        figures.append(
            SlotFigures(
                column=CATEGORICAL[slot],
                num_ids=size,
                num_tombstones=tombstones[slot] if tombstones else None,
                num_zero_rows=int((norms[0] == 0).sum()),
                num_not_finite=size - finite.shape[1],
                max_norm=float(finite[0].max()) if there_are else None,
                mean_norms=tuple(finite.mean(axis=1).tolist()) if there_are else (),
            )
        )
    return figures


def _norms(stored: StoredModel, rows: slice) -> NDArray[np.float64]:
    """L2 norm of each row of each part, in float64: squares of large float32 values overflow in their own type."""
    return np.stack([np.linalg.norm(tensors.table[rows].astype(np.float64), axis=1) for tensors in stored.parts])


def _dense(stored: StoredModel) -> list[ArrayFigures]:
    return [
        _array(name if part == PARTS[0] else f"{name} {part}", values)
        for part, tensors in zip(PARTS, stored.parts)
        for name, values in tensors.dense.items()
    ]


def _array(name: str, values: FloatArray) -> ArrayFigures:
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


_SLOT_HEAD = ("slot", "ids", "tombstones", "zero rows", "not finite", "max norm", "mean norm", "mean |m|", "mean |v|")


def _slot_cells(slot: SlotFigures) -> Sequence[str]:
    counts = (slot.num_ids, slot.num_tombstones, slot.num_zero_rows, slot.num_not_finite)
    norms = (slot.max_norm, *slot.mean_norms, None, None, None)
    return slot.column, *map(_count, counts), *map(_number, norms[:4])


def _cells(array: ArrayFigures) -> Sequence[str]:
    shape = "x".join(map(str, array.shape))
    return array.name, shape, *map(_number, (array.norm, array.minimum, array.maximum)), _count(array.num_not_finite)


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The rows with columns of one width: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
        yield "  ".join(cells).rstrip()
