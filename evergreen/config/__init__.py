"""Settings: the sections of a recommender's file, and the reader of all settings.

Each section of a recommender's file has its own module. The module `spec` represents the complete
file, and the module `sections` checks every section. `reader` reads the settings of a section from
a mapping, flags, environment variables or a URL. The settings of an installation are not in a
recommender's file. Each program defines its installation settings in a dataclass. `reader` reads
installation settings too. Programs and the client import this package first, so it imports few
other packages.
"""
