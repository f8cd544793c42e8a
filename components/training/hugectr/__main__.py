"""Writes a stored DCN as HugeCTR's files: `python -m components.training.hugectr MODEL FOLDER`.

For whoever goes on with HugeCTR itself, or with NVIDIA's ONNX converter, which reads DCN v1 only: it turns a DCN v2
into a wrong graph without an error. The files are those of one GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from components.contracts.manifests import Model
from components.models.configs import DcnConfig, config_from_document
from components.models.files import open_model
from components.runtime.durable import whole_directory
from components.runtime.errors import ContractError
from components.runtime.exit_codes import exits_with_code
from components.training.config import TrainingSettings
from components.training.hugectr.files import StateLayout, export_model
from components.training.hugectr.layers import write_graph
from components.training.hugectr.settings import smallest_workspace_mb

GRAPH_FILE = "dcn.json"


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Writes the files; its exit code is an `exit_codes.ExitCode`."""
    parser = argparse.ArgumentParser(prog="python -m components.training.hugectr", description=__doc__)
    parser.add_argument("model", type=Path, help="folder of a model in the store")
    parser.add_argument("folder", type=Path, help="new folder for HugeCTR's files")
    flags = parser.parse_args(argv)
    with whole_directory(flags.folder) as aside:
        export_stored_model(flags.model, aside)
    return 0


def export_stored_model(model_folder: Path, into: Path) -> None:
    """Writes HugeCTR's files of the model in `model_folder` into the folder `into`, for one GPU.

    Raises:
        ContractError: the model is no DCN, or one of its files is damaged.
    """
    model = Model.read(model_folder / Model.MANIFEST)
    config = config_from_document(model.config)
    if not isinstance(config, DcnConfig):
        raise ContractError(f"network of {model.model_id} is {config.network!r}, expected dcn: HugeCTR builds no other")
    num_rows = sum(model.slot_sizes)
    workspace_mb = smallest_workspace_mb(num_rows, config.embedding_dim)
    layout = StateLayout(num_rows=num_rows, dim=config.embedding_dim, num_gpus=1, workspace_mb=workspace_mb)
    export_model(open_model(model_folder / Model.WEIGHTS, model.slot_sizes), config, layout, folder=into)
    write_graph(into / GRAPH_FILE, config, TrainingSettings(), workspace_mb=workspace_mb)


if __name__ == "__main__":
    raise SystemExit(main())
