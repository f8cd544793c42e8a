"""Simulate how an autoscaler scales Triton under a trace of requests.

This is the simulator of `evergreen simulate autoscaler`. It reads the shipped manifest and query,
and needs no cluster.
"""
