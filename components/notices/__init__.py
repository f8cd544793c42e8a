"""Messages to people over a webhook: their form, and sending one. What is worth sending is the callers' decision."""
