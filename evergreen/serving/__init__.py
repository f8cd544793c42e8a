"""Serving in Triton: one ONNX graph for each model, its parity check, repository, servers and
release.

The deployment step releases models with it, and the controller rolls releases back with it.
"""
