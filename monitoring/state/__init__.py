"""From the log to the archive: what is stored, joined and written, so that nothing acknowledged is lost."""
