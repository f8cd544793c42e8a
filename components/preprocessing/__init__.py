"""Preprocessing step: encodes raw rows as ids and normalised values, with NumPy or NVTabular."""
