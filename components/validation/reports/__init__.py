"""What validation found, for machines (`document`) and for people (`page`, drawn from the same document)."""
