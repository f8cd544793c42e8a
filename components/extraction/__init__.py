"""Extraction: the rows of one time window of the lake, as a `RawDataset`.

Beside them, rows of days before the window, drawn by `replay`: to be learned again, and to measure what is remembered.

`python -m components.extraction` is the pipeline's step, `python -m cli.ingest` brings a user's
Criteo files into the lake. Judging the rows is left to validation, encoding them to preprocessing.
"""
