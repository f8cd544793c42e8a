"""Simulate how an autoscaler scales Triton under a trace of requests.

This package is the simulator behind `evergreen simulate autoscaler`. The simulator reads the
shipped manifest and query, and needs no cluster.
"""
