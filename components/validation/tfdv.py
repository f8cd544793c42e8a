"""TensorFlow Data Validation, imported without its chatter; the rest of the step imports TFDV from here.

The import takes about 3 s and 600 MB: nothing that only parses flags or compiles the pipeline may import this module.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings

# Read once, when TensorFlow's C++ library is loaded; 3 keeps errors only.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

_disabled = logging.root.manager.disable
# Beam warns through the root logger (crcmod), Google's packages by FutureWarning (Python's age), TFDV by print
# (IPython); none of it concerns this step. An error at import still propagates.
logging.disable(logging.WARNING)
with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
    warnings.simplefilter("ignore")
    import tensorflow_data_validation as tfdv
    from tensorflow_data_validation.statistics import stats_impl
    from tensorflow_data_validation.statistics.generators.stats_generator import CombinerStatsGenerator
    from tensorflow_metadata.proto.v0 import anomalies_pb2, schema_pb2, statistics_pb2
    from tfx_bsl.arrow import table_util
logging.disable(_disabled)

__all__ = [
    "CombinerStatsGenerator",
    "anomalies_pb2",
    "schema_pb2",
    "statistics_pb2",
    "stats_impl",
    "table_util",
    "tfdv",
]
