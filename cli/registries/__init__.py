"""Export a model registry to the registries of other teams: MLflow and Kubeflow's Model Registry.

The export only reads the model registry. The export is not part of a run. A run therefore never
waits for an external registry, and never fails because of one.
"""
