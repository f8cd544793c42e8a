"""Readers of click logs, text or Parquet, all yielding record batches in the raw schema of a recommender.

`forms.find_reader` finds the form of a file. Which rows are wanted, and in what order, is left to the callers.
"""
