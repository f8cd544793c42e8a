"""Objects in a local folder or a bucket, behind one interface.

A write is atomic, and a conditional write fails if another writer came first. This package does not
interpret the content of objects. For example, deployment keeps Triton's repository here, and the
inference client reads the traffic plan from it.
"""
