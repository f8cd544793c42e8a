"""The HugeCTR backend: the engine of `training.engine` over NVIDIA's classic Python API (merlin-hugectr 24.06)."""
