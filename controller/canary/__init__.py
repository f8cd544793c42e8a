"""A canary: a version that takes a growing share of the traffic until it is live or aborted."""
