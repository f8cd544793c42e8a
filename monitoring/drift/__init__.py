"""Whether what is served now looks like what the champion was trained on, without labels."""
