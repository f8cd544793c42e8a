"""A simulated full disk that affects only this process."""

import resource
from contextlib import contextmanager


@contextmanager
def files_of_at_most(num_bytes):
    """Limit the size of this process's files. Larger writes fail with EFBIG, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
