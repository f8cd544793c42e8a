"""Objects in a folder or a bucket, behind one interface: whole or absent, written only where nobody else wrote first.

Knows the contracts alone. What the objects mean is their owners': deployment keeps Triton's repository here, the
inference client reads the traffic plan from it.
"""
