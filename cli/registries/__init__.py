"""Export a model registry to those of other teams: MLflow and Kubeflow's Model Registry.

The export only reads the store. It is not part of a run, so that no run waits for a foreign
registry or fails with it.
"""
