"""Settings: the sections of a recommender's file, and the reader of all settings.

Each section has its module. `spec` represents the complete file, and `sections` checks every
section. `reader` reads a section from a mapping, flags, environment variables or a URL. A setting
of an installation belongs to a class in the module of the program that uses it, and the same reader
reads it. This package imports few others, because programs and the client import it first.
"""
