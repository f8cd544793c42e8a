"""Serving in Triton: ONNX graph of a model, parity check, model repository, servers, release.

The deployment step uses this package to release models. The controller uses this package to roll
releases back.
"""
