"""Policies: evidence in, a decision with its reason and numbers out. Pure; acting is `monitoring.acting`'s.

Only `baseline` reads a file.
"""
