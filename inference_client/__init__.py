"""The caller of the served model: scores rows, ranks candidates, replays traffic, and publishes what it saw.

Knows the rest of the repository by `components.contracts` alone. The synthetic click world that stands in for real
users lives in `simulation`. Judging the records is the monitor's job; serving the model is Triton's.
"""
