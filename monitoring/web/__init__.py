"""HTTP interface of the monitor: metrics, health and the status page."""
