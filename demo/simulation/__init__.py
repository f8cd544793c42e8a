"""Simulate click logs in Criteo's shape, with known click probabilities and drift on request.

Only the module `simulator` needs more than NumPy, because it writes Parquet. The package is
independent of servers and event logs.
"""
