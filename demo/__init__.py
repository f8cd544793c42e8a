"""The laptop: the pipeline, Triton and the whole loop as local processes."""
