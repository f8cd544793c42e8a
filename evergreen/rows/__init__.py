"""Readers of rows in files: users' text, JSON lines and Parquet, and the archive's Parquet.

All readers parse values by the same rules. `forms.find_reader` detects the format of a file. Every
reader yields record batches in the raw schema of a recommender. The callers select rows and order
them.
"""
