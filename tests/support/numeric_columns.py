"""Numeric columns with every kind of options, and their reference values in float64."""

import math

import numpy as np

from evergreen.config.features import Features, NumericOptions

OPTIONS = {
    "as it is": NumericOptions(transform=()),
    "log": NumericOptions(fill=2.0, transform=("clip(0)", "log1p")),
    "standard": NumericOptions(transform=("standardize",), indicator=True),
    "range": NumericOptions(fill=-1.0, transform=("clip(-2..3.5)", "minmax")),
    "tiny": NumericOptions(transform=("standardize",)),
    "constant": NumericOptions(transform=("minmax",), indicator=True),
}
EVERY_KIND = Features(
    numeric=("usual", *OPTIONS),
    categorical=("item",),
    numeric_options=OPTIONS | {"usual": NumericOptions()},
)
STEPS = {name: each.transform for name, each in OPTIONS.items()} | {
    "usual": ("clip(0)", "log1p", "standardize")
}


def values_of(name, count, *, seed=0):
    """Return float32 values of a column, including negative, large and missing (NaN) ones."""
    random = np.random.default_rng([seed, len(name)])
    values = {"tiny": random.normal(size=count) * 1e-30, "constant": np.zeros(count)}.get(
        name, random.normal(size=count) * 10.0 ** random.integers(-3, 6, count)
    )
    return np.where(random.random(count) < 0.2, np.nan, values).astype(np.float32)


def unscaled(name, values):
    """Return the values of a column before they are scaled."""
    fill = OPTIONS[name].fill if name in OPTIONS else 0.0
    found = [fill if math.isnan(value) else float(value) for value in values]
    for step in STEPS[name]:
        if step.startswith("clip"):
            least, *largest = map(float, step[5:-1].split(".."))
            found = [min(max(value, least), *largest, math.inf) for value in found]
        elif step == "log1p":
            found = [math.log1p(value) for value in found]
    return np.array(found)


def scaling_of(name, values):
    """Return the offset and the divisor that scale `values`."""
    last = STEPS[name][-1] if STEPS[name] else None
    if last == "standardize":
        return values.mean(), values.std(ddof=min(1, len(values) - 1)) or 1.0
    return (values.min(), values.max() - values.min() or 1.0) if last == "minmax" else (0.0, 1.0)
