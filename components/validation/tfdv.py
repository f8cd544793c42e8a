"""TensorFlow Data Validation, imported without its chatter and without TensorFlow; the step imports TFDV from here.

TFDV imports TensorFlow, and Beam the clients of Google's services; statistics, schema and anomalies need neither, but
for one function (`as_bytes`). Measured on two cores: 7.4 s and 604 MB for the plain import, 1.5 s and 189 MB for this
one. A release of TFDV that uses TensorFlow at import has it executed then, and one that cannot be imported so is
imported plainly.

Whoever sends a Beam pipeline to Google imports `apache_beam` before this module: Beam that is imported here behaves as
installed without its extra `gcp`. Nothing that only parses flags or compiles the pipeline may import this module.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys

from components.runtime.interpreter import importing
from components.validation.as_bytes import spare
from components.validation.deferred import absent, deferring, is_deferred, quietly

# Read once, when TensorFlow's C++ library is loaded; 3 keeps errors only.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

_PACKAGE = "tensorflow_data_validation"
_UNUSED = ("tensorflow", f"{_PACKAGE}.skew.feature_skew_detector")
"""What TFDV imports and the step does not use; the detector names TensorFlow's classes in its signatures."""
_GOOGLE = ("apitools", "google.cloud.bigquery", "google.cloud.pubsub", "google.cloud.storage")
_NEEDED = ("statistics.stats_impl", "statistics.stats_options", "api.stats_api", "api.validation_api")


def _import_deferred() -> None:
    """Imports what the step uses of TFDV; where that fails, leaves no half-imported TFDV to the plain import."""
    with contextlib.ExitStack() as stack:
        if "apache_beam" not in sys.modules:
            stack.enter_context(absent(*_GOOGLE))
        stack.enter_context(deferring(modules=_UNUSED, packages=[_PACKAGE]))
        try:
            modules = [importlib.import_module(f"{_PACKAGE}.{name}") for name in _NEEDED]
        except (ImportError, AttributeError):
            for name in [n for n in sys.modules if n.split(".")[0] == _PACKAGE]:
                del sys.modules[name]
            return
    if is_deferred("tensorflow"):
        spare(modules[-1])


with quietly(), importing():
    _import_deferred()
    import tensorflow_data_validation as tfdv
    from tensorflow_data_validation.statistics import stats_impl
    from tensorflow_data_validation.statistics.generators.basic_stats_generator import BasicStatsGenerator
    from tensorflow_data_validation.statistics.generators.stats_generator import CombinerStatsGenerator
    from tensorflow_data_validation.utils.top_k_uniques_stats_util import (
        FeatureValueCount,
        make_feature_stats_proto_topk_uniques,
    )
    from tensorflow_metadata.proto.v0 import anomalies_pb2, schema_pb2, statistics_pb2
    from tfx_bsl.sketches import KmvSketch, MisraGriesSketch

__all__ = [
    "BasicStatsGenerator",
    "CombinerStatsGenerator",
    "FeatureValueCount",
    "KmvSketch",
    "MisraGriesSketch",
    "anomalies_pb2",
    "make_feature_stats_proto_topk_uniques",
    "schema_pb2",
    "statistics_pb2",
    "stats_impl",
    "tfdv",
]
