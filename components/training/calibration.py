"""Correct the bias of the final logit, as the last step of a fit.

After training, a model's mean prediction is several percent too high or too low. The reason is the
strong effect of the last rows on the bias. The correction changes only the bias. Afterwards, the
mean prediction equals the click rate of the newest training rows. The correction changes no
ranking. `start` corrects for negative downsampling, and `fit` corrects for features that are served
as one value.

Rows may have weights. Only the ratios of the weights matter: if all weights are 3, the result is
the same as if all are 1.
"""

import math

import numpy as np
from numpy.typing import NDArray

_PRIOR_DEVIATION = 0.1
"""Standard deviation of the shift's normal prior. The value is the standard deviation that was
measured in fits without the correction. A few dozen clicks determine the click rate only to about
ten percent. The prior prevents a few clicks from shifting a parent that was calibrated on many more
clicks."""
_MIN_PROBABILITY = 1e-7
_NEWEST_PARTS = (1, 3, 10)
"""Parts of the rows that can set the bias: all rows, the newest third, or the newest tenth."""
_MAX_STANDARD_ERRORS = 3.0
"""Maximum difference between the clicks of the newest tenth and the expected clicks, in standard
errors. If the difference is larger, the correction uses a smaller part of the rows."""


def newest_bias_shift(
    labels: NDArray[np.float32],
    probabilities: NDArray[np.float32],
    weights: NDArray[np.float32] | None = None,
) -> float:
    """Return the shift of the bias that fits the newest rows.

    The shift is computed from three sets of rows in turn: all rows, the newest third, and the
    newest tenth. The first shift that fits the newest tenth is returned, or else the last shift. A
    shift fits if the shifted predictions give about the right number of clicks in the newest tenth.
    The difference must be at most three standard errors (binomial). If the click rate changed
    within the window, a shift computed from all rows could undo the effect of the newest training
    rows.

    Args:
        labels: 0 or 1 in order of time, [n].
        probabilities: Predictions of the model, [n].
        weights: Sample weights, [n], or None for equal weights.

    >>> labels = np.tile([1.0, 0.0, 0.0, 0.0], 10_000)  # one click in four rows
    >>> round(newest_bias_shift(labels, np.full(40_000, 0.25)), 3)
    0.0
    """
    newest = slice(len(labels) - len(labels) // _NEWEST_PARTS[-1], None)
    logits, shift = _logits(probabilities[newest]), 0.0
    evidence = (
        None
        if weights is None
        else _evidence(labels[newest], probabilities[newest], weights[newest])
    )
    clicks = _total(labels[newest], evidence)
    for part in _NEWEST_PARTS:
        rows = slice(len(labels) - len(labels) // part, None)
        shift = bias_shift(
            labels[rows], probabilities[rows], None if weights is None else weights[rows]
        )
        expected = 1 / (1 + np.exp(-logits - shift))
        error = math.sqrt(_total(expected * (1 - expected), evidence))
        if abs(_total(expected, evidence) - clicks) <= _MAX_STANDARD_ERRORS * error:
            break
    return shift


def bias_shift(
    labels: NDArray[np.float32],
    probabilities: NDArray[np.float32],
    weights: NDArray[np.float32] | None = None,
) -> float:
    """Return the most likely shift of all logits, given a normal prior around 0.

    The shift minimises the sum of the rows' log losses plus shift^2 / (2 * 0.1^2). The sum is
    convex, and Newton's method finds its minimum. Each row's log loss is multiplied by its
    `_evidence`.

    Args:
        labels: Labels, 0 or 1, [n].
        probabilities: Predictions of the model, [n].
        weights: Sample weights, [n], or None for equal weights.

    >>> labels, probabilities = np.repeat([0.0, 1.0], [30_000, 10_000]), np.full(40_000, 0.2)
    >>> round(bias_shift(labels, probabilities), 3)  # log(0.25 / 0.75) - log(0.2 / 0.8) is 0.288
    0.284
    >>> round(bias_shift(labels[29_990:30_010], probabilities[:20]), 2)  # a few rows hardly count
    0.06
    """
    evidence = None if weights is None else _evidence(labels, probabilities, weights)
    logits, clicks = _logits(probabilities), _total(labels, evidence)
    precision, shift = _PRIOR_DEVIATION**-2, 0.0
    for _ in range(50):
        expected = 1 / (1 + np.exp(-logits - shift))
        slope = _total(expected, evidence) - clicks + precision * shift
        step = slope / (_total(expected * (1 - expected), evidence) + precision)
        shift -= min(max(step, -1.0), 1.0)
        if abs(step) < 1e-9:
            break
    return shift


def _evidence(
    labels: NDArray[np.float32], probabilities: NDArray[np.float32], weights: NDArray[np.float32]
) -> NDArray[np.float64]:
    """Convert each weight, [n], to an effective number of independent rows of weight 1.

    Equal weights become 1. All weights are multiplied by the same factor, so that two estimates of
    the variance of the weighted errors agree. The first estimate adds squared error times squared
    weight for each row. The second estimate adds squared error times weight, as for repeated rows
    of weight 1.
    """
    squares = (labels - probabilities.astype(np.float64)) ** 2
    doubled = _total(squares, weights.astype(np.float64) ** 2)
    return weights.astype(np.float64) * (_total(squares, weights) / doubled if doubled else 0.0)


def _total(values: NDArray[np.floating], weights: NDArray[np.floating] | None) -> float:
    return float(
        (values if weights is None else values * weights.astype(np.float64)).sum(dtype=np.float64)
    )


def corrected(probabilities: NDArray[np.float32], shift: float) -> NDArray[np.float32]:
    """Return the probabilities after adding `shift` to every logit, [n].

    >>> # Odds of 1/4 and 1 become 1 and 4.
    >>> corrected(np.array([0.2, 0.5], np.float32), math.log(4)).tolist()
    [0.5, 0.800000011920929]
    """
    return (1 / (1 + np.exp(-_logits(probabilities) - shift))).astype(np.float32)


def _logits(probabilities: NDArray[np.float32]) -> NDArray[np.float64]:
    clipped = np.clip(probabilities.astype(np.float64), _MIN_PROBABILITY, 1 - _MIN_PROBABILITY)
    return np.log(clipped / (1 - clipped))
