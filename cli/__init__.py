"""The `evergreen` command line, with one module for each command."""
