"""Contracts between programs: columns, manifests, served tensors, log records, metric definitions.

The package needs only the standard library, NumPy and msgspec. `record_format` also needs Protobuf.
The package runs on Python 3.10 to 3.12 and imports no other package of this repository. A module
belongs here if it defines what two packages exchange, and its docstring names both.
"""
