"""What people and Prometheus see of the monitor: metrics, health, the status page."""
