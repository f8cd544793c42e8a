"""Base of every program: errors and exit codes, durable files, forked work.

It imports no other package of ours.
"""
