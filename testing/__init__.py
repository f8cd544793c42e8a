"""Build data, models, releases and processes for tests and benchmarks."""
