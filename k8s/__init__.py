"""Deployment on Kubernetes: manifests, which `kubectl kustomize` renders, and `scaling`, the autoscaler simulated."""
