"""PyTorch engine, which trains any network on the CPU or an NVIDIA GPU."""
