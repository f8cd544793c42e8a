"""Compiles the retraining pipeline to the KFP IR file that a cluster takes and the laptop runs."""

from __future__ import annotations

import os
from pathlib import Path

from kfp import compiler

from pipelines.placement import Placement
from pipelines.retraining import retraining_pipeline


def compile_pipeline(path: Path, placement: Placement) -> None:
    """Writes the compiled pipeline to `path` (YAML), whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The compiler writes in place and insists on the ending.
    aside = path.with_name(f".{path.stem}.{os.getpid()}.yaml")
    try:
        compiler.Compiler().compile(retraining_pipeline(placement), str(aside))
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
