"""Most frequent values and numbers of distinct values of the categories, as a TFDV statistics generator.

Takes the place of TFDV's own `TopKUniquesSketchStatsGenerator`, with the same sketches, sizes and output, but gives the
sketches each distinct value of a batch once, with its count, where TFDV's gives them the value of every row (measured
on 400k rows: 0.47 s instead of 1.27 s). A column with at most 1024 distinct values comes out the same to the bit;
beyond, both may lack up to a 1024th of the rows in any count.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from components.validation.tfdv import (
    CombinerStatsGenerator,
    FeatureValueCount,
    KmvSketch,
    MisraGriesSketch,
    make_feature_stats_proto_topk_uniques,
    statistics_pb2,
    tfdv,
)

Sketches = dict[str, tuple[Any, Any]]

HELD_COUNTS = 1024
HELD_HASHES = 16_384
"""Sizes of TFDV's own sketches; the number of distinct values is exact below the second, then within about 2 %."""


class TopValuesGenerator(CombinerStatsGenerator):  # type: ignore[misc]  # TFDV has no types
    """Sketches of every column of strings."""

    def __init__(self, *, num_top_values: int, num_rank_histogram_buckets: int) -> None:
        """Keeps the counts of `num_top_values` and, as a histogram, of `num_rank_histogram_buckets` values."""
        super().__init__("top_values")
        self._sizes = {"num_top_values": num_top_values, "num_rank_histogram_buckets": num_rank_histogram_buckets}
        self._held = max(HELD_COUNTS, *self._sizes.values())

    def create_accumulator(self) -> Sketches:
        """No values yet."""
        return {}

    def add_input(self, accumulator: Sketches, input_record_batch: pa.RecordBatch) -> Sketches:
        """`accumulator` with the list columns of a batch counted in."""
        for name, column in zip(input_record_batch.schema.names, input_record_batch.columns):
            values = column.flatten()
            if not pa.types.is_string(values.type):
                continue
            # float32 is what the sketch takes for a weight; a batch's counts are exact in it.
            counted = values.value_counts()
            distinct, counts = accumulator.setdefault(name, (KmvSketch(HELD_HASHES), MisraGriesSketch(self._held)))
            distinct.AddValues(counted.field(0))
            counts.AddValues(counted.field(0), counted.field(1).cast(pa.float32()))
        return accumulator

    def merge_accumulators(self, accumulators: Any) -> Sketches:
        """The sketches of all rows behind several accumulators."""
        merged: Sketches = {}
        for accumulator in accumulators:
            for name, sketches in accumulator.items():
                if name not in merged:
                    merged[name] = sketches
                    continue
                for mine, theirs in zip(merged[name], sketches):
                    mine.Merge(theirs)
        return merged

    def extract_output(self, accumulator: Sketches) -> Any:
        """A `DatasetFeatureStatistics` with the string statistics of every column that has values."""
        result = statistics_pb2.DatasetFeatureStatistics()
        for name, (distinct, counts) in accumulator.items():
            listed = [FeatureValueCount(pair["values"], pair["counts"]) for pair in counts.Estimate().to_pylist()]
            if listed:
                feature = make_feature_stats_proto_topk_uniques(
                    feature_path=tfdv.FeaturePath([name]),
                    num_unique=distinct.Estimate(),
                    value_count_list=listed,
                    **self._sizes,
                )
                result.features.add().CopyFrom(feature)
        return result
