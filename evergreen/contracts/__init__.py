"""Contracts between programs: columns, manifests, served tensors, log records and metrics.

The package needs only the standard library, NumPy and msgspec. Only the module `record_format` also
needs Protobuf. The package runs on Python 3.10 to 3.12 and imports no other package of this
repository. Each module of this package defines data that two other packages exchange, and its
docstring names both packages.
"""
