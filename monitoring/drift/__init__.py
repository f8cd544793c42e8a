"""Compare production features with the champion's training rows, without labels."""
