"""The PyTorch engine: a fused embedding table and hand-written steps, on the CPU or an NVIDIA GPU."""
