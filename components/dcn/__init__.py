"""The Deep & Cross Network in PyTorch: a layer below the steps, shared by training and evaluation."""

from __future__ import annotations

import os


def share_cores() -> None:
    """Lets OpenMP's threads sleep where they wait; works only before torch is imported.

    They otherwise spin at barriers, and on a laptop whose cores are shared with live traffic that made a fit 20 times
    slower (63 s against 3 to 5 s). A value that the environment sets stays.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
