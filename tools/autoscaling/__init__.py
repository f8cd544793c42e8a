"""What an autoscaler would do to Triton under a trace of requests: the simulator behind `evergreen scale`.

Nothing here talks to a cluster: the shipped manifest and the shipped query are read, the rest is computed.
"""
