"""What two programs must agree on: columns, manifests, served tensors, log records, metric definitions.

Needs the standard library, NumPy and msgspec only (`record_format` Protobuf too), runs on Python 3.10 to 3.12, and
imports no other room of this repository. A module belongs here if it can name the two rooms that it joins.
"""
