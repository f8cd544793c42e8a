"""HugeCTR engine, which uses NVIDIA's classic Python API (merlin-hugectr 24.06)."""
