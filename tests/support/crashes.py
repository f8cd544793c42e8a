"""A process killed in the middle of its work, as a test can raise it."""

from __future__ import annotations


class Killed(BaseException):
    """Stands for SIGKILL: no `except Exception` of the product may catch it."""
