"""Draw windows of a stationary simulator, plant shifts, and find them with several methods."""
