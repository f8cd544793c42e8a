"""Policies: evidence in, a decision with its reason and numbers out; when a run must wait, and what it is asked for.

Pure: no module here reads a file or a clock. Acting on decisions is left to `monitoring.acting`.
"""
