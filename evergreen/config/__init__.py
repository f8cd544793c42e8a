"""Settings: the sections of a recommender's file, and the reader of all settings.

Each section has its module. `spec` represents the complete file, and `sections` checks every
section. `reader` reads a section from a mapping, flags, environment variables or a URL. The
settings of an installation are different: a class in the module of the program defines them, and
the same reader reads them. This package imports few other packages, because programs and the client
import it first.
"""
