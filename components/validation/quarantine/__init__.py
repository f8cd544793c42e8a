"""Rows that a rule sets aside: which they are, the dataset without them, where they are kept, and their way back."""
