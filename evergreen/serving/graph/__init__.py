"""Export the ONNX graph from raw features to probability, and check its parity with training."""
