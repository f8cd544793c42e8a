"""The validation step: TFDV statistics of the training rows, drift against the champion, and pass, warn or block."""
