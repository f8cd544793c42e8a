"""Policies: evidence in, a decision with its reason and numbers out; when a run must wait, and what is requested.

Pure: no module here reads a file or a clock. Acting on decisions is left to `monitoring.retraining`.
"""
