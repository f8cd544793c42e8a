"""A disk that becomes full, for this process alone."""

import resource
from contextlib import contextmanager


@contextmanager
def files_of_at_most(num_bytes):
    """The kernel refuses to make a file of this process larger (EFBIG), as it refuses what a full disk cannot hold."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
