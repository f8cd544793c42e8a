"""Write a model with initial weights for benchmarks of serving.

The speed of serving does not depend on training. Training's own code creates weights and graph in
training's environment, which has torch. The process that calls this module needs no torch.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command import run_to_end
from demo.environments import python_of
from evergreen.config.model import NetworkConfig, config_from_document
from evergreen.networks.files import NETWORK_FILE, Tensors, open_model

CLICK_RATE = 0.25


def write_initial_model(
    folder: Path, config: NetworkConfig, slot_sizes: Sequence[int], *, seed: int
) -> Tensors:
    """Write weights and `network.onnx` into the folder, and return the weights."""
    parameters = json.dumps(
        {"config": config.as_document(), "slot_sizes": list(slot_sizes), "seed": seed}
    )
    run_to_end(
        [str(python_of("training")), "-m", "benchmarks.initial_model", str(folder), parameters]
    )
    return open_model(folder, slot_sizes).weights


def main(arguments: Sequence[str]) -> None:
    """Write a model. `write_initial_model` passes the folder and the settings as arguments."""
    from components.training.start import write_initial
    from evergreen.networks.network import export_onnx
    from evergreen.networks.scoring import load_network

    folder, parameters = Path(arguments[0]), json.loads(arguments[1])
    config = config_from_document(parameters["config"])
    write_initial(
        folder, config, parameters["slot_sizes"], click_rate=CLICK_RATE, seed=parameters["seed"]
    )
    network, _ = load_network(folder, config, parameters["slot_sizes"])
    (folder / NETWORK_FILE).write_bytes(export_onnx(network, config))


if __name__ == "__main__":
    main(sys.argv[1:])
