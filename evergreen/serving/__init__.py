"""A model as Triton serves it: one ONNX graph, its parity, the model repository, the servers and a release.

The deployment step releases with it, and the controller takes releases back with it.
"""
