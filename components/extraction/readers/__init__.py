"""Readers: one module per form that click logs come in, all yielding record batches of the raw schema.

`forms.find_reader` tells which form a file has. Which rows are wanted, and in what order, is left to the callers.
"""
