"""Train/serve skew: what the model is trained on beside what it was served, row by row where rows can be joined."""
