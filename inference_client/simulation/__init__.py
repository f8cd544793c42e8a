"""The synthetic click world: Criteo-shaped rows whose true click probability is known, and drift on request.

NumPy only; writing Parquet (`lake`) needs pyarrow. Nothing here knows of servers or logs.
"""
