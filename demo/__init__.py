"""Run the pipeline, Triton and the complete loop as local processes on a laptop."""
