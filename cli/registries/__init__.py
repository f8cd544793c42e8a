"""What a model store tells the registries that other teams look into: MLflow and Kubeflow's Model Registry.

Reads the store alone and is no part of a round, so that no round waits for a registry or fails by it.
"""
