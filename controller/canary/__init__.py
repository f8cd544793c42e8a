"""Run a canary: a version whose share of the traffic grows until it is live or aborted."""
