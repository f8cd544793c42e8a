"""What serving is measured against. All but this package's `encoded_graph` runs in the `serving-peers` environment."""
