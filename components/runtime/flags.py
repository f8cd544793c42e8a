"""Command-line flags: what several commands and components share."""


def run_flags(**values: object) -> list[str]:
    """The command line that gives a step these values; each flag is named as its value, with hyphens.

    >>> run_flags(run="r 1", batch_size=2048)
    ['--run=r 1', '--batch-size=2048']
    """
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
