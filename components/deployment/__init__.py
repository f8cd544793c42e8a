"""Deployment step of the pipeline: serve an accepted model in Triton, or change nothing.

The model is exported as one ONNX graph from raw features to probability, and its parity is checked.
The version is published atomically, probed, and then recorded in the journal.
"""
