"""Messages to people over a webhook. The callers decide what to send."""
