"""The training step: TrainingSet (+ parent Model) -> Model in the store."""
