"""Act on decisions: one pipeline run at a time, and notifications."""
