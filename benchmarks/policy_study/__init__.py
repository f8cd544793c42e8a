"""Streams of rows with planted AUC, and when each policy speaks on them."""
