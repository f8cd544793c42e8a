"""Peers of the serving benchmark, which run in the `serving-peers` environment."""
