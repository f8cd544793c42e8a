"""What is in one stored model, as lines for a terminal: `evergreen model inspect`.

Figures of the table slot by slot and of the dense parameters, each with its optimizer state, and the hashes of all
parts. The table is read in pieces, so a model need not fit into memory. Only hashes, files that cannot be read and
numbers that are not finite are judged.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from components.contracts.manifests import Model
from components.contracts.workflow import FeatureWorkflow
from components.models.configs import config_from_document
from components.models.files import MOMENTS, FloatArray, StoredModel, Table, chunks, open_model, tables_of
from components.runtime.durable import sha256_tree
from components.runtime.errors import ContractError

_SLOT_HEAD = ("slot", "ids", "tombstones", "zero rows", "not finite", "max norm", "mean norm", "mean |m|", "mean |v|")
_DENSE_HEAD = ("dense", "shape", "norm", "min", "max", "not finite")
Cell = str | int | float


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """All that is printed of one model."""

    lines: list[str]
    faults: list[str]
    """One sentence for each hash that differs, each kind of number that is not finite, and what cannot be read."""


def print_inspection(folder: Path) -> int:
    """Prints the model's figures; 0, or 1 where it has faults, such as a hash that differs from the manifest's."""
    inspection = inspect_model(folder)
    for line in [*inspection.lines, *(f"FAULT    {fault}" for fault in inspection.faults)]:
        print(line)
    return 1 if inspection.faults else 0


def inspect_model(folder: Path) -> Inspection:
    """The figures of the model in `folder`, a folder of the model store; a damaged model is a finding like any other.

    Raises:
        ContractError: the folder has no manifest.
    """
    manifest = Model.read(folder / Model.MANIFEST)
    config = config_from_document(manifest.config)
    settings = config.as_document()
    network = settings.pop("network")
    parent = manifest.parent_model_id or "none"
    faults = []
    lines = [
        f"folder   {folder}",
        f"model    {manifest.model_id} of backend {manifest.backend}, parent {parent}, seed {manifest.seed}",
        f"rows     {manifest.num_train_rows:,} up to {manifest.last_learned_time}, created {manifest.created_at}",
        f"steps    {manifest.optimizer_step:,} of the optimizer, over all rounds",
        f"network  {network}: " + ", ".join(f"{name} {value}" for name, value in settings.items() if value != []),
    ]
    for part, promised in manifest.sha256.items():
        found = sha256_tree(folder / part) if (folder / part).exists() else "absent"
        lines.append(f"sha256   {part} {found}, {'as' if found == promised else 'not as'} promised")
        if found != promised:
            faults.append(f"{part} has sha256 {found}, expected {promised} as in the manifest")
    try:
        workflow = FeatureWorkflow.load(folder / Model.WORKFLOW)
        stored = open_model(folder / Model.WEIGHTS, manifest.slot_sizes)
    except ContractError as error:
        return Inspection(lines=lines, faults=[*faults, str(error)])
    tables = tables_of(workflow.features.id_places, config.widths)
    slots = list(_slot_figures(stored, workflow, tables))
    dense = list(_dense_figures(stored))
    lines += ["", *_format_table([_SLOT_HEAD, *slots]), "", *_format_table([_DENSE_HEAD, *dense])]
    if stored.moments is None:
        lines.append("no optimizer state was kept")
    faults += [f"{slot[0]} has {slot[4]} rows with numbers that are not finite" for slot in slots if slot[4]]
    faults += [f"{each[0]} has {each[5]} numbers that are not finite" for each in dense if each[5]]
    return Inspection(lines=lines, faults=faults)


def _slot_figures(
    stored: StoredModel, workflow: FeatureWorkflow, tables: Sequence[Table]
) -> Iterator[tuple[Cell, ...]]:
    """A line of `_SLOT_HEAD` for each slot; norms are of rows with finite values only."""
    names, sizes = workflow.features.slots, workflow.slot_sizes
    parts_of_slots = zip(*(tensors.slots(sizes, tables) for tensors in stored.parts))
    for column, parts, size, num_tombstones in zip(names, parts_of_slots, sizes, workflow.tombstones):
        norms = np.concatenate([_row_norms(parts, rows) for rows in chunks(0, size)], axis=1)
        finite = norms[:, np.isfinite(norms).all(axis=0)]
        figures = [float(finite[0].max()), *finite.mean(axis=1).tolist()] if finite.size else []
        yield column, size, num_tombstones, int((norms[0] == 0).sum()), size - finite.shape[1], *figures


def _row_norms(parts: Sequence[FloatArray], rows: slice) -> NDArray[np.float64]:
    """L2 norm of each row of each part, in float64: squares of large float32 values overflow in their own type."""
    return np.stack([np.linalg.norm(vectors[rows].astype(np.float64), axis=1) for vectors in parts])


def _dense_figures(stored: StoredModel) -> Iterator[tuple[Cell, ...]]:
    """A line of `_DENSE_HEAD` for each dense parameter and each of its moments, of finite values only."""
    for suffix, tensors in zip(("", *(f".{moment}" for moment in MOMENTS)), stored.parts):
        for name, values in tensors.dense.items():
            finite = values[np.isfinite(values)].astype(np.float64)
            figures = [float(np.linalg.norm(finite)), float(finite.min()), float(finite.max())] if finite.size else []
            figures += [float("nan")] * (3 - len(figures))
            yield f"{name}{suffix}", "x".join(map(str, values.shape)), *figures, values.size - finite.size


def _format_table(rows: Iterable[tuple[Cell, ...]]) -> Iterator[str]:
    """The rows with columns of one width: the first to the left, the others to the right."""
    texts = [[f"{cell:,.4g}" if isinstance(cell, float) else f"{cell}" for cell in row] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(*(row + [""] * (9 - len(row)) for row in texts))]
    for first, *others in texts:
        yield "  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]).rstrip()
