"""One ONNX graph from raw features to probability: made, proven equal to training's scores, and measured in memory."""
