"""The networks behind one seam: an `nn.Module` and its configuration each, a model's files, scores, the ONNX export.

`configs` has the table of all networks, `network` what each of them promises; `dcn`, `deepfm` and `dlrm` are the
networks. `files` is a model's folder in the store, `scoring` gives probabilities.
`configs` and `files` import no torch, so that command lines, deployment and the monitor can use them.
"""

import os


def share_cores() -> None:
    """Lets OpenMP's threads sleep while they wait; works only before torch is imported.

    By default they spin at barriers, which made a fit 20 times slower on a laptop whose cores were shared with live
    traffic (63 s against 3 to 5 s). A value that the environment sets is kept.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
