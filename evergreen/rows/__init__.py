"""Rows in files: text, JSON lines and Parquet of users, read under one set of rules, and the archive's Parquet.

`forms.find_reader` finds the form of a file. Every reader yields record batches in the raw schema of a recommender.
Which rows are wanted, and in what order, is left to the callers.
"""
