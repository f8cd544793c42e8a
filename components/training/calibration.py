"""The last step of a fit: the final logit's bias.

What an optimizer learned last leaves a model's mean prediction several percent off, in either direction. The bias alone
corrects it: the predictions' mean becomes the click rate of the newest learned rows. No ranking changes by it. The
correction for thinned rows is `start`'s, that for features which are served as one value is `fit`'s.

Rows may have weights, which count relative to each other: weights of 3 give what weights of 1 give.
"""

import math

import numpy as np
from numpy.typing import NDArray

_PRIOR_DEVIATION = 0.1
"""Standard deviation of the shift, as fits without the correction showed it. A few dozen clicks, whose rate is known to
some ten percent, then hardly move a parent that many more had calibrated."""
_CLIPPED = 1e-7
_NEWEST_PARTS = (1, 3, 10)
"""The rows by which the bias is set: all, their newest third, or their newest tenth."""
_CONTRADICTED = 3.0
"""Standard errors by which the newest tenth's clicks must differ from what is expected before fewer rows are taken."""


def newest_bias_shift(
    labels: NDArray[np.float32], probabilities: NDArray[np.float32], weights: NDArray[np.float32] | None = None
) -> float:
    """`bias_shift` by the largest of all rows, the newest third and the newest tenth that still holds at the end.

    A part holds where the clicks of the newest tenth are within three standard errors (binomial) of what its shift
    makes the model expect. So a click rate that changed within the window, and was learned, is not taken back. Labels
    are 0 or 1, in order of time; without weights all rows count alike. All are [n].

    >>> labels = np.tile([1.0, 0.0, 0.0, 0.0], 10_000)  # one click in four rows
    >>> round(newest_bias_shift(labels, np.full(40_000, 0.25)), 3)
    0.0
    """
    newest = slice(len(labels) - len(labels) // _NEWEST_PARTS[-1], None)
    logits, shift = _logits(probabilities[newest]), 0.0
    evidence = None if weights is None else _evidence(labels[newest], probabilities[newest], weights[newest])
    clicks = _total(labels[newest], evidence)
    for part in _NEWEST_PARTS:
        rows = slice(len(labels) - len(labels) // part, None)
        shift = bias_shift(labels[rows], probabilities[rows], None if weights is None else weights[rows])
        expected = 1 / (1 + np.exp(-logits - shift))
        error = math.sqrt(_total(expected * (1 - expected), evidence))
        if abs(_total(expected, evidence) - clicks) <= _CONTRADICTED * error:
            break
    return shift


def bias_shift(
    labels: NDArray[np.float32], probabilities: NDArray[np.float32], weights: NDArray[np.float32] | None = None
) -> float:
    """What to add to every logit: the most likely shift, given a normal prior around 0.

    Minimises the log loss' sum over the rows plus shift^2 / (2 * 0.1^2) by Newton's method; the sum is convex. Labels
    are 0 or 1; without weights all rows count alike; all are [n]. Each row's log loss is multiplied by its `_evidence`.

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
    """Weights scaled so that their rows say as much as so many rows of weight 1; 1 for equal weights, [n].

    A weighted sum of the rows' errors has the variance of the sum of their squares, weighted by the squared weights;
    what a sum of independent rows of weight 1 would have is the sum weighted by the weights themselves.
    """
    squares = (labels - probabilities.astype(np.float64)) ** 2
    doubled = _total(squares, weights.astype(np.float64) ** 2)
    return weights.astype(np.float64) * (_total(squares, weights) / doubled if doubled else 0.0)


def _total(values: NDArray[np.floating], weights: NDArray[np.floating] | None) -> float:
    return float((values if weights is None else values * weights.astype(np.float64)).sum(dtype=np.float64))


def corrected(probabilities: NDArray[np.float32], shift: float) -> NDArray[np.float32]:
    """The probabilities after every logit is moved by `shift`, [n].

    >>> corrected(np.array([0.2, 0.5], np.float32), math.log(4)).tolist()  # odds of 1/4 and 1 become 1 and 4
    [0.5, 0.800000011920929]
    """
    return (1 / (1 + np.exp(-_logits(probabilities) - shift))).astype(np.float32)


def _logits(probabilities: NDArray[np.float32]) -> NDArray[np.float64]:
    clipped = np.clip(probabilities.astype(np.float64), _CLIPPED, 1 - _CLIPPED)
    return np.log(clipped / (1 - clipped))
