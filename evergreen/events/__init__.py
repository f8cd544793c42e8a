"""Event logs that carry records from the inference client to the monitor, one module per backend.

`evergreen.events.event_log` has the interface that every backend implements.
"""
