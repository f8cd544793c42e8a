"""Name the steps of the GPU benchmark, and their order."""

DEFAULT_RATES = "rates-dcn-1.2M"
"""Rates for the network and the table size of NVIDIA's DCN sample."""
NETWORKS, TABLES = ("dcn", "deepfm", "dlrm"), ("1.2M", "10M", "100M")
RATES = tuple(f"rates-{network}-{table}" for table in TABLES for network in NETWORKS)
STEPS = (
    "limits",
    "tests",
    "equality",
    DEFAULT_RATES,
    "loading",
    "memory",
    *(name for name in RATES if name != DEFAULT_RATES),
    "serving",
    *(f"graphs-{network}" for network in NETWORKS),
)
"""All steps, in order of importance, because the time may run out. Graphs come last, because a CUDA
graph that fails may leave the GPU unusable."""
