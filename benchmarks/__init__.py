"""Benchmarks for the numbers of the README, each compared with a named peer in the same run.

They are not tests: no figure decides whether a build is right. `components` and the other packages
do not import this one.
"""
