"""The retraining pipeline: its DAG, where its steps run, its package and its submission."""
