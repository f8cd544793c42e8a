"""Where an incremental round takes over: `Start`, which `parent` makes and a fit restores."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Start:
    """A parent's model, already grown to the training set's slot sizes."""

    weights: Path
    """Folder of HugeCTR's files, with Adam's moments where the parent kept them; the table is never held in memory."""
    optimizer_step: int
    """Steps that the parent's optimizer took, over all rounds before this one."""
