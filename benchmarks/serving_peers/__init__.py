"""What serving is measured against; runs in the `serving-peers` environment."""
