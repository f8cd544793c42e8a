"""TensorFlow Data Validation, imported without its chatter; the rest of the step imports TFDV from here.

The import takes about 3 s and 600 MB: nothing that only parses flags or compiles the pipeline may import this module.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator

# Read once, when TensorFlow's C++ library is loaded; 3 keeps errors only.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drops what is said at import and concerns nobody here; an import that fails still says why.

    Beam warns through the root logger (crcmod), Google's packages by FutureWarning (Python's age), TFDV by print
    (IPython).
    """
    disabled, handlers = logging.root.manager.disable, list(logging.root.handlers)
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        # A root logger without handlers gave itself one at its first warning, on the stream that is gone now.
        logging.root.handlers[:] = handlers


with _quiet():
    import tensorflow_data_validation as tfdv
    from tensorflow_data_validation.statistics import stats_impl
    from tensorflow_data_validation.statistics.generators.stats_generator import CombinerStatsGenerator
    from tensorflow_metadata.proto.v0 import anomalies_pb2, schema_pb2, statistics_pb2
    from tfx_bsl.arrow import table_util

__all__ = [
    "CombinerStatsGenerator",
    "anomalies_pb2",
    "schema_pb2",
    "statistics_pb2",
    "stats_impl",
    "table_util",
    "tfdv",
]
