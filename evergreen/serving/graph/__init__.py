"""Export the serving graph as ONNX, and check its scores against training."""
