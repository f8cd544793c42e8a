"""What runs inside the retraining pipeline's containers: one package per step, and the contracts between them."""
