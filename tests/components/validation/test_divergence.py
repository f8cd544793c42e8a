"""Compares the divergence of two samples with TFDV's result. Only this environment has TFDV."""

import numpy as np
import pytest
import tensorflow_data_validation as tfdv
from tensorflow_metadata.proto.v0 import schema_pb2, statistics_pb2

from evergreen.statistics.two_sample import jensen_shannon


def test_divergence_of_any_counts_is_tfdvs():
    random = np.random.default_rng(0)
    for size in (2, 17, 900):
        a, b = random.poisson(random.gamma(0.3, 60, (2, size)))
        a[0] = b[1] = 1
        edges = np.arange(size + 1.0)
        assert jensen_shannon(a, b) == pytest.approx(tfdvs_jensen_shannon(a, b, edges), abs=1e-9)


def tfdvs_jensen_shannon(now, before, edges):
    def statistics(counts):
        result, num = statistics_pb2.DatasetFeatureStatisticsList(), int(sum(counts))
        feature = result.datasets.add(num_examples=num).features.add(
            type=statistics_pb2.FeatureNameStatistics.FLOAT
        )
        feature.path.step.append("x")
        common = feature.num_stats.common_stats
        common.num_non_missing = common.tot_num_values = num
        common.min_num_values = common.max_num_values = 1
        histogram = feature.num_stats.histograms.add()
        for low, high, count in zip(edges, edges[1:], counts):
            histogram.buckets.add(low_value=low, high_value=high, sample_count=float(count))
        return result

    schema = schema_pb2.Schema()
    comparator = schema.feature.add(
        name="x", type=schema_pb2.FLOAT
    ).drift_comparator.jensen_shannon_divergence
    comparator.threshold = 1e-6
    comparator.source.type = schema_pb2.HistogramSelection.STANDARD
    found = tfdv.validate_statistics(
        statistics(now), schema, previous_statistics=statistics(before)
    )
    ((measured,),) = (info.drift_measurements for info in found.drift_skew_info)
    return measured.value
