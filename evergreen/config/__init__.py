"""Settings: the sections of a recommender's file, one module each, and the one reader of all settings.

`spec` is the file as a whole, `sections` checks all of it, and `reader` reads any section from a mapping, flags,
environment variables or a URL. What belongs to an installation has its class beside the program that uses it, and is
read by the same reader. Light: programs and the client import it before anything else.
"""
