"""Deployment: an accepted model becomes a version that Triton serves, or nothing changes.

One ONNX graph from raw features to probability, parity proven, published whole, probed, and only then recorded.
"""
