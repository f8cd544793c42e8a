"""Base of every program: errors and exit codes, durable files, forked work.

This package imports no other package of this project.
"""
