"""The retraining pipeline: its DAG, placement, compiled file and submission."""
