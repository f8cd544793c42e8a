"""Deployment step of the pipeline: request the release of an accepted model.

The model is exported as one ONNX graph from raw features to probability, and its parity is checked.
The step then appends a request to the journal and waits for the controller's answer. The step
writes only to the model registry.
"""
