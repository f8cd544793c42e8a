"""The file `recommender.yaml`: read, checked and written, drafted from a file of rows, and tried on one.

What a description is, is told by `evergreen.config`. Accepted descriptions are kept by `registry.recommenders`.
"""
