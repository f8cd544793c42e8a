"""The rules about single rows, each over a batch: which rows offend, and why. What becomes of them is `screening`'s.

A rule looks at a batch in the raw schema; a missing value offends none but `label_kind`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator
from datetime import datetime, timezone
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from components.contracts import criteo
from components.runtime.errors import ContractError
from components.validation.rules.judging import Judging

Offences = Iterator[tuple[int, str]]
"""Position of a row in the batch, and why it offends."""


class RowRule(NamedTuple):
    """One rule, ready to look at batches."""

    name: str
    find: Callable[[pa.RecordBatch], Offences]


class Bounds(NamedTuple):
    """What a number may be; NaN and infinity offend where they are disallowed, whatever the bounds."""

    low: float = -math.inf
    high: float = math.inf
    disallow_nan: bool = False
    disallow_inf: bool = False


def make_row_rules(
    judging: Judging, schema: Any | None, before: Any | None, *, excluded: Container[str] = ()
) -> tuple[list[RowRule], list[str]]:
    """The rules that are on, in the catalogue's order, and the names of those that have nothing to compare with.

    Args:
        judging: Actions and parameters.
        schema: In force; None in a first run, which is yet to infer it.
        before: TFDV's statistics of the champion's rows; None without one.
        excluded: Features that the run left out.

    Raises:
        ContractError: a named day is no date.
    """
    rules, idle = [], []
    for name in judging.row_rules():
        parameters = judging.parameters[name]
        if name == "label_kind":
            rules.append(RowRule(name, _wrong_labels))
        elif name == "named_rows":
            rules.append(RowRule(name, _named(parameters["request_ids"], parameters["days"])))
        elif name == "domain" and schema is not None:
            rules.append(RowRule(name, _out_of_domain(schema, excluded)))
        elif name == "outlier" and (limits := _limits(parameters, schema, before, excluded)):
            rules.append(RowRule(name, partial(_outside, bounds=limits)))
        else:
            idle.append(name)
    return rules, idle


def _wrong_labels(batch: pa.RecordBatch) -> Offences:
    labels = batch.column(criteo.LABEL)
    known = pc.is_in(labels, value_set=pa.array([0, 1], labels.type))  # null is not in it
    for at in _positions(pc.invert(known)):
        yield at, f"label is {labels[at].as_py()!r}, expected 0 or 1"


def _named(request_ids: tuple[str, ...], days: tuple[str, ...]) -> Callable[[pa.RecordBatch], Offences]:
    spans = [_day_micros(day) for day in days]

    def find(batch: pa.RecordBatch) -> Offences:
        if request_ids:
            ids = batch.column(criteo.REQUEST_ID)
            for at in _positions(pc.is_in(ids, value_set=pa.array(request_ids, pa.string()))):
                yield at, f"request {ids[at].as_py()!r} is named by the rule"
        if spans:
            times = batch.column(criteo.EVENT_TIME).cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
            for day, low in zip(days, spans):
                for at in np.flatnonzero((times >= low) & (times < low + 86_400_000_000)):
                    yield int(at), f"day {day} is named by the rule"

    return find


def _day_micros(day: str) -> int:
    try:
        begin = datetime.strptime(day, "%Y-%m-%d").replace(tzinfo=timezone.utc)
    except ValueError as error:
        raise ContractError(f"rule named_rows: day is {day!r}, expected YYYY-MM-DD") from error
    return criteo.microseconds(begin.timestamp())


def _out_of_domain(schema: Any, excluded: Container[str]) -> Callable[[pa.RecordBatch], Offences]:
    lists = {domain.name: set(domain.value) for domain in schema.string_domain}
    bounds: dict[str, Bounds] = {}
    allowed: dict[str, set[str]] = {}
    for feature in schema.feature:
        if feature.name in excluded:
            continue
        kind = feature.WhichOneof("domain_info")
        if kind in ("float_domain", "int_domain") and feature.name not in criteo.CATEGORICAL:
            bounds[feature.name] = _bounds_of(getattr(feature, kind))
        elif kind == "string_domain":
            allowed[feature.name] = set(feature.string_domain.value)
        elif kind == "domain":
            allowed[feature.name] = lists[feature.domain]

    def find(batch: pa.RecordBatch) -> Offences:
        yield from _outside(batch, bounds)
        for name in allowed.keys() & set(batch.schema.names):
            texts = batch.column(name).cast(pa.string())
            known = pc.is_in(texts, value_set=pa.array(sorted(allowed[name]), pa.string()))
            for at in _positions(pc.and_(pc.invert(known), pc.is_valid(texts))):
                yield at, f"{name} is {texts[at].as_py()}, expected one of the schema's {len(allowed[name])} values"

    return find


def _bounds_of(domain: Any) -> Bounds:
    low = float(domain.min) if domain.HasField("min") else -math.inf
    high = float(domain.max) if domain.HasField("max") else math.inf
    return Bounds(low, high, getattr(domain, "disallow_nan", False), getattr(domain, "disallow_inf", False))


def _limits(parameters: Any, schema: Any | None, before: Any | None, excluded: Container[str]) -> dict[str, Bounds]:
    """What is no outlier, by dense column; empty where there is nothing to compare with."""
    factor, quantile = parameters["factor"], parameters["quantile"]
    if quantile is not None:
        from components.validation.quarantine.quantiles import dense_quantiles

        ends = dense_quantiles(before, quantile) if before is not None else {}
    else:
        domains = {f.name: f.float_domain for f in schema.feature} if schema is not None else {}
        ends = {n: (d.min, d.max) for n, d in domains.items() if d.HasField("min") and d.HasField("max")}
    # An end of zero has no multiple; it is taken for one.
    return {
        name: Bounds(-factor * max(abs(low), 1.0), factor * max(abs(high), 1.0))
        for name, (low, high) in ends.items()
        if name in criteo.DENSE and name not in excluded
    }


def _outside(batch: pa.RecordBatch, bounds: dict[str, Bounds]) -> Offences:
    for name in batch.schema.names:
        if name not in bounds:
            continue
        low, high, disallow_nan, disallow_inf = bounds[name]
        values = batch.column(name).cast(pa.float64())
        numbers: NDArray[np.float64] = values.fill_null(math.nan).to_numpy(zero_copy_only=False)
        wrong = (numbers < low) | (numbers > high)
        if disallow_nan:
            wrong |= np.isnan(numbers) & values.is_valid().to_numpy(zero_copy_only=False)
        if disallow_inf:
            wrong |= np.isinf(numbers)
        for at in np.flatnonzero(wrong):
            yield int(at), f"{name} is {numbers[at]:g}, expected {low:g} to {high:g}"


def _positions(mask: Any) -> list[int]:
    return [int(at) for at in np.flatnonzero(mask.fill_null(False).to_numpy(zero_copy_only=False))]
