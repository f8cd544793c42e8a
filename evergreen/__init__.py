"""The core: what every program of Evergreen shares.

Packages are ordered in layers, from `runtime` at the bottom to `serving` at the top.
"""
