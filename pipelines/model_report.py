"""Prints what `pipelines.model_inspection` found in a stored model, as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from components.contracts.dcn import DcnConfig
from pipelines.model_inspection import ArrayFigures, Inspection, PartHash, SlotFigures, inspect_model


def print_inspection(folder: Path, config_path: Path | None) -> int:
    """Prints the model's figures; 0, or 1 where it has faults, such as a hash that differs from the manifest's."""
    inspection = inspect_model(folder, config_path)
    for line in report(inspection):
        print(line)
    return 1 if inspection.faults else 0


def report(inspection: Inspection) -> Iterator[str]:
    """The lines of the report."""
    yield f"folder   {inspection.folder}"
    if manifest := inspection.manifest:
        parent = manifest.parent_model_id or "none"
        yield f"model    {manifest.model_id} of backend {manifest.backend}, parent {parent}, seed {manifest.seed}"
        yield f"rows     {manifest.num_train_rows:,} up to {manifest.last_event_time}, created {manifest.created_at}"
        yield f"steps    {manifest.optimizer_step:,} of the optimizer, over all rounds"
    yield f"network  {_network(inspection.config)}"
    yield from map(_hash, inspection.hashes)
    if inspection.slots:
        yield from _weights(inspection)
    for fault in inspection.faults:
        yield f"FAULT    {fault}"


def _weights(inspection: Inspection) -> Iterator[str]:
    yield ""
    yield from _columns([_SLOT_HEAD, *map(_slot, inspection.slots), _total(inspection.slots)])
    if not inspection.has_table_moments:
        yield "the table's optimizer state was not kept"
    yield ""
    arrays = [*inspection.dense, *inspection.dense_moments]
    yield from _columns([("dense", "shape", "norm", "min", "max", "not finite"), *map(_array, arrays)])
    if not inspection.dense_moments:
        yield "the dense optimizer state was not kept"


def _network(config: DcnConfig) -> str:
    kind = f"DCN v2 of rank {config.projection_dim}" if config.projection_dim else "DCN v1"
    tower = "-".join(map(str, config.tower))
    return (
        f"{kind}: embedding {config.embedding_dim}, {config.num_cross_layers} cross layers, tower {tower}, "
        f"dropout {config.dropout:g}"
    )


def _hash(part: PartHash) -> str:
    promise = "as promised" if part.promised else "nothing promised"
    return f"sha256   {part.part} {part.found or 'absent'}, {'differs' if part.differs else promise}"


_SLOT_HEAD = (
    "slot", "ids", "rows", "tombstones", "zero rows", "not finite", "mean norm", "max norm", "mean |m|", "mean |v|",
)  # fmt: skip


def _slot(slot: SlotFigures) -> Sequence[str]:
    first, second = slot.mean_moment_norms or (None, None)
    return (
        slot.column,
        _count(slot.num_ids),
        _count(slot.num_rows),
        _count(slot.num_tombstones),
        _count(slot.num_zero_rows),
        _count(slot.num_not_finite),
        *map(_number, (slot.mean_norm, slot.max_norm, first, second)),
    )


def _total(slots: Sequence[SlotFigures]) -> Sequence[str]:
    tombstones = [slot.num_tombstones for slot in slots if slot.num_tombstones is not None]
    return (
        "all",
        _count(sum(slot.num_ids for slot in slots)),
        _count(sum(slot.num_rows for slot in slots)),
        _count(sum(tombstones) if tombstones else None),
        _count(sum(slot.num_zero_rows for slot in slots)),
        _count(sum(slot.num_not_finite for slot in slots)),
        "",
        _number(max((slot.max_norm for slot in slots if slot.max_norm is not None), default=None)),
        "",
        "",
    )


def _array(array: ArrayFigures) -> Sequence[str]:
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
