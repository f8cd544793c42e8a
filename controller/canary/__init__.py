"""Run a canary, a version with a growing share of the traffic until it is live or aborted."""
