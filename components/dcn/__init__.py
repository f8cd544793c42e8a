"""The Deep & Cross Network in PyTorch: a layer below the steps, shared by training and evaluation."""
