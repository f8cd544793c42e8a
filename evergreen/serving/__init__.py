"""Serving in Triton: ONNX graph of a model, parity check, model repository, servers, release.

The deployment step releases models with it, and the controller rolls releases back with it.
"""
