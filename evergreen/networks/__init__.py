"""Networks, their configurations and files, scoring, and the ONNX export.

`configs` has the table of all networks, and `network` has their common interface. The networks are
`dcn`, `deepfm` and `dlrm`. `files` reads and writes a model's folder in the registry. `scoring`
computes click probabilities. `configs` and `files` do not import torch, so that command lines,
deployment and the monitor can use them.
"""

import os


def share_cores() -> None:
    """Let OpenMP's threads sleep while they wait. Call this before torch is imported.

    By default, OpenMP's threads spin while they wait at barriers. On a laptop whose cores also
    served live traffic, the spinning made a fit about 20 times slower (63 s instead of 3 to 5 s).
    If `OMP_WAIT_POLICY` is already set in the environment, its value is not changed.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
