"""Windows of a stationary simulator, planted shifts, and the methods that find them."""
