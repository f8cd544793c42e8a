"""Policies of the monitor: from evidence to a decision with its reason and numbers.

No module here reads a file or a clock. `monitoring.retraining` acts on the decisions.
"""
