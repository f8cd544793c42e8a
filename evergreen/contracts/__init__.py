"""Contracts between programs: columns, manifests, served tensors, log records and metrics.

The package needs only the standard library, NumPy and msgspec. Only the module `record_format` also
needs Protobuf. The package runs on Python 3.10 to 3.12 and imports no other package of this
repository. This package is for modules that define what two other packages exchange. The docstring
of each module here names both packages.
"""
