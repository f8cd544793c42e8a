"""HugeCTR engine, on NVIDIA's classic Python API (merlin-hugectr 24.06)."""
