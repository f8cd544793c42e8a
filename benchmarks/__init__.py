"""Benchmarks for the figures in the README.

Each figure is compared with a named peer in the same run.

Benchmarks are not tests, and no figure fails a build. `components` and the other packages do not
import this package.
"""
