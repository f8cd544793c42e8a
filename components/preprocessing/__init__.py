"""Preprocessing: raw rows become the ids and normalised values that models train on, by NVTabular or NumPy."""
