"""State of the monitor: stored records, the label join, and the archive files."""
