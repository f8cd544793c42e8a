"""Windows of a world that stands still, shifts planted into them, and who finds which."""
