"""The last step of a fit: the bias at which the predictions' mean is the click rate of the newest learned rows.

What an optimizer learned last leaves a model's mean prediction several percent off, in either direction. The bias alone
corrects it, and no ranking changes. The correction for thinned rows is `start`'s.
"""

from __future__ import annotations

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


def newest_bias_shift(labels: NDArray[np.float32], probabilities: NDArray[np.float32]) -> float:
    """`bias_shift` by the largest of all rows, the newest third and the newest tenth that still holds at the end.

    A part holds where the clicks of the newest tenth are within three standard errors (binomial) of what its shift
    makes the model expect. So a click rate that changed within the window, and was learned, is not taken back.

    Args:
        labels: 0 or 1, in order of time, [n].
        probabilities: In [0, 1], [n].

    >>> labels = np.tile([1.0, 0.0, 0.0, 0.0], 10_000)  # one click in four rows
    >>> round(newest_bias_shift(labels, np.full(40_000, 0.25)), 3)
    0.0
    """
    newest = slice(len(labels) - len(labels) // _NEWEST_PARTS[-1], None)
    logits, shift = _logits(probabilities[newest]), 0.0
    for part in _NEWEST_PARTS:
        rows = slice(len(labels) - len(labels) // part, None)
        shift = bias_shift(labels[rows], probabilities[rows])
        expected = 1 / (1 + np.exp(-logits - shift))
        error = float(np.sqrt((expected * (1 - expected)).sum()))
        if abs(float(expected.sum()) - float(labels[newest].sum(dtype=np.float64))) <= _CONTRADICTED * error:
            break
    return shift


def bias_shift(labels: NDArray[np.float32], probabilities: NDArray[np.float32]) -> float:
    """What to add to every logit: the most likely shift, given a normal prior around 0.

    Minimises the log loss' sum over the rows plus shift^2 / (2 * 0.1^2) by Newton's method; the sum is convex.

    Args:
        labels: 0 or 1, [n].
        probabilities: In [0, 1], [n].

    >>> labels, probabilities = np.repeat([0.0, 1.0], [30_000, 10_000]), np.full(40_000, 0.2)
    >>> round(bias_shift(labels, probabilities), 3)  # log(0.25 / 0.75) - log(0.2 / 0.8) is 0.288
    0.284
    >>> round(bias_shift(labels[29_990:30_010], probabilities[:20]), 2)  # a few rows hardly count
    0.06
    """
    logits, clicks = _logits(probabilities), float(labels.sum(dtype=np.float64))
    precision, shift = _PRIOR_DEVIATION**-2, 0.0
    for _ in range(50):
        expected = 1 / (1 + np.exp(-logits - shift))
        slope = float(expected.sum()) - clicks + precision * shift
        step = slope / (float((expected * (1 - expected)).sum()) + precision)
        shift -= min(max(step, -1.0), 1.0)
        if abs(step) < 1e-9:
            break
    return shift


def _logits(probabilities: NDArray[np.float32]) -> NDArray[np.float64]:
    clipped = np.clip(probabilities.astype(np.float64), _CLIPPED, 1 - _CLIPPED)
    return np.log(clipped / (1 - clipped))
