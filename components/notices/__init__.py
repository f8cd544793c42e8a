"""Messages to people over a webhook: their form, and one sending. What is worth telling is the callers'."""
