"""Readers of files with rows.

Users' files are text, JSON lines or Parquet, and archived files are Parquet.

All readers parse values by the same rules. `forms.find_reader` detects the format of a file. Every
reader yields record batches in the raw schema of a recommender. The callers select rows and order
them.
"""
