"""The retraining pipeline: its DAG, where its steps run, and the whole loop on a laptop."""
