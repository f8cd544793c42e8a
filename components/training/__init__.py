"""Training step: fits a network and publishes the model to the registry."""
