"""The PyTorch engine: any network behind the seam, one embedding table, on the CPU or an NVIDIA GPU."""
