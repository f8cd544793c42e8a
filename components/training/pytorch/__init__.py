"""PyTorch engine: any network, on the CPU or an NVIDIA GPU."""
