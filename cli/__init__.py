"""The `evergreen` command line: one module a command."""
