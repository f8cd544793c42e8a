"""Torch's threads wait without spinning, as in the steps: tests share their cores with other work."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
