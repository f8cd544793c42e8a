"""The monitor measures drift as TFDV does: the same counts give the same distances, and so do the same rows.

Here because TFDV lives in this environment only.
"""

import numpy as np
import pyarrow as pa
import pytest
import tensorflow_data_validation as tfdv
from tensorflow_metadata.proto.v0 import schema_pb2, statistics_pb2

from components.config.features import MISSING_CATEGORY
from components.config.monitor import DriftSettings
from components.contracts import criteo, raw_rows
from components.contracts.records import PredictionBatch, Predictions
from components.drift_statistics import jensen_shannon
from components.validation.windows import BLOCK_ROWS, ReferenceCounter
from monitoring.drift.comparison import compare
from monitoring.drift.sketch import Layout, Sketch
from tests.support.validation_statistics import statistics_of


def compared(now, before):
    """The monitor's sketch and report of the rows `now`, against `before` as validation counts them."""
    counter = ReferenceCounter(criteo.CRITEO)
    for batch in before.to_batches():
        counter.add(batch)
    sketch = Sketch(Layout(counter.statistics()))
    for number, batch in enumerate(now.to_batches(max_chunksize=64)):
        request = PredictionBatch(
            request_id=f"r{number}",
            time=0.0,
            model_version=1,
            dense=raw_rows.feature_matrix(batch, criteo.DENSE, "float32", missing=np.nan),
            categorical=raw_rows.feature_matrix(batch, criteo.CATEGORICAL, "int64", missing=MISSING_CATEGORY),
            scores=np.full(batch.num_rows, 0.5, np.float32),
        )
        sketch.add(Predictions.of([request]))
    return sketch, {column.column: column for column in compare(sketch, DriftSettings())}


def test_the_same_categories_have_tfdvs_distances(judged):
    """TFDV counts both sides itself. Both halves of the reference have all values, so that it lists each of them."""
    rows = judged(BLOCK_ROWS)
    before, now = pa.concat_tables([rows] * 4).combine_chunks(), rows.slice(0, 500)
    _, ours = compared(now, before)
    schema = schema_pb2.Schema()
    for name in criteo.CATEGORICAL:
        feature = schema.feature.add(name=name, type=schema_pb2.BYTES)
        feature.drift_comparator.infinity_norm.threshold = 1e-6
    found = tfdv.validate_statistics(statistics_of(now), schema, previous_statistics=statistics_of(before))
    theirs = {info.path.step[0]: info.drift_measurements[0].value for info in found.drift_skew_info}
    assert set(theirs) == set(criteo.CATEGORICAL)
    for name, distance in theirs.items():
        assert ours[name].distance == pytest.approx(distance, abs=1e-9)


def test_the_divergence_of_any_counts_is_tfdvs():
    random = np.random.default_rng(0)
    for size in (2, 17, 900):
        a, b = random.poisson(random.gamma(0.3, 60, (2, size)))
        a[0] = b[1] = 1
        edges = np.arange(size + 1.0)
        assert jensen_shannon(a, b) == pytest.approx(tfdvs_jensen_shannon(a, b, edges), abs=1e-9)


def tfdvs_jensen_shannon(now, before, edges):
    def statistics(counts):
        result, num = statistics_pb2.DatasetFeatureStatisticsList(), int(sum(counts))
        feature = result.datasets.add(num_examples=num).features.add(type=statistics_pb2.FeatureNameStatistics.FLOAT)
        feature.path.step.append("x")
        common = feature.num_stats.common_stats
        common.num_non_missing = common.tot_num_values = num
        common.min_num_values = common.max_num_values = 1
        histogram = feature.num_stats.histograms.add()
        for low, high, count in zip(edges, edges[1:], counts):
            histogram.buckets.add(low_value=low, high_value=high, sample_count=float(count))
        return result

    schema = schema_pb2.Schema()
    comparator = schema.feature.add(name="x", type=schema_pb2.FLOAT).drift_comparator.jensen_shannon_divergence
    comparator.threshold = 1e-6
    comparator.source.type = schema_pb2.HistogramSelection.STANDARD
    found = tfdv.validate_statistics(statistics(now), schema, previous_statistics=statistics(before))
    ((measured,),) = (info.drift_measurements for info in found.drift_skew_info)
    return measured.value
