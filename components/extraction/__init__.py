"""Extraction: copies the rows of one time window of the lake into a `RawDataset`.

Extraction also samples rows of earlier days (`components.extraction.replay`). The model is trained
on some of the sampled rows again. The rest of the sampled rows measure how much the model has
forgotten.

`python -m components.extraction` is the pipeline's step. `python -m cli.ingest` writes a user's
Criteo files to the lake. Validation checks the rows, and preprocessing encodes them.
"""
