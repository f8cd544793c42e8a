"""The seven steps of the retraining pipeline, one package and one image each."""
