"""The synthetic click world: Criteo-shaped rows whose true click probability is known, and drift on request.

Only `lake`, which writes Parquet, needs more than NumPy. Nothing here knows of servers or logs.
"""
