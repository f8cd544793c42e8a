"""The parts of `benchmarks/freshness.py`: rounds of learning, the simulated days, and what is told of them."""
