"""What the world's columns look like, shaped after real Criteo rows (missing shares, tails, cardinalities).

Facts only; `tables` draws from them. Cardinalities are scaled for a laptop: up to 20,000 distinct values.
The shares of planted variance say which columns matter: most of it lies in columns of few, frequent categories, so
that a change can be learned again from some ten thousand rows.
"""

from dataclasses import dataclass

from components.contracts.criteo import CATEGORICAL, CRITEO_RECOMMENDER, DENSE

RECOMMENDER = CRITEO_RECOMMENDER
"""Whose rows a world draws, where nobody describes another one with the same features."""


@dataclass(frozen=True)
class WorldDenseColumn:
    """A heavy-tailed integer: floor(exp(mu + sigma z)) + minimum, z standard normal, cut at the maximum."""

    missing: float
    """Share of rows without a value. Columns with the same share lack it in the same rows, as in the real log."""
    minimum: int
    median: int
    p99: int
    maximum: int
    variance: float
    """Share of the planted logit's variance."""


@dataclass(frozen=True)
class WorldCategoryColumn:
    """A column of hashed categories: one head value, then Zipf."""

    missing: float
    cardinality: int
    head: float
    """Share of the most frequent value among the present ones."""
    exponent: float
    """Zipf exponent of the others, fitted so that 6,400 rows hold about as many distinct values as real ones."""
    variance: float


DENSE_COLUMNS: dict[str, WorldDenseColumn] = {
    "I1": WorldDenseColumn(0.436, 0, 1, 41, 173, 0.02),
    "I2": WorldDenseColumn(0.0, -2, 2, 2082, 7864, 0.015),
    "I3": WorldDenseColumn(0.227, 0, 6, 354, 21636, 0.005),
    "I4": WorldDenseColumn(0.247, 0, 4, 43, 166, 0.01),
    "I5": WorldDenseColumn(0.037, 0, 2671, 290220, 1_600_000, 0.02),
    "I6": WorldDenseColumn(0.235, 0, 35, 1543, 5139, 0.015),
    "I7": WorldDenseColumn(0.044, 0, 3, 194, 1658, 0.02),
    "I8": WorldDenseColumn(0.001, 0, 8, 48, 756, 0.005),
    "I9": WorldDenseColumn(0.044, 0, 42, 1189, 7463, 0.005),
    "I10": WorldDenseColumn(0.436, 0, 0, 3, 7, 0.005),
    "I11": WorldDenseColumn(0.044, 0, 1, 24, 79, 0.02),
    "I12": WorldDenseColumn(0.765, 0, 0, 17, 98, 0.005),
    "I13": WorldDenseColumn(0.247, 0, 4, 67, 773, 0.01),
}

CATEGORY_COLUMNS: dict[str, WorldCategoryColumn] = {
    "C1": WorldCategoryColumn(0.0, 1000, 0.50, 1.7, 0.04),
    "C2": WorldCategoryColumn(0.0, 500, 0.12, 0.95, 0.08),
    "C3": WorldCategoryColumn(0.034, 20000, 0.04, 0.7, 0.004),
    "C4": WorldCategoryColumn(0.034, 16000, 0.05, 0.8, 0.004),
    "C5": WorldCategoryColumn(0.0, 120, 0.68, 1.9, 0.04),
    "C6": WorldCategoryColumn(0.12, 12, 0.40, 2.0, 0.05),
    "C7": WorldCategoryColumn(0.0, 6000, 0.02, 0.75, 0.004),
    "C8": WorldCategoryColumn(0.0, 200, 0.60, 1.95, 0.03),
    "C9": WorldCategoryColumn(0.0, 3, 0.89, 0.3, 0.01),
    "C10": WorldCategoryColumn(0.0, 15000, 0.24, 0.9, 0.004),
    "C11": WorldCategoryColumn(0.0, 3000, 0.04, 0.8, 0.004),
    "C12": WorldCategoryColumn(0.034, 18000, 0.04, 0.75, 0.004),
    "C13": WorldCategoryColumn(0.0, 2400, 0.04, 0.8, 0.004),
    "C14": WorldCategoryColumn(0.0, 26, 0.35, 0.9, 0.17),
    "C15": WorldCategoryColumn(0.0, 4000, 0.04, 0.85, 0.004),
    "C16": WorldCategoryColumn(0.034, 17000, 0.04, 0.8, 0.004),
    "C17": WorldCategoryColumn(0.0, 10, 0.46, 1.2, 0.16),
    "C18": WorldCategoryColumn(0.0, 1800, 0.05, 0.85, 0.004),
    "C19": WorldCategoryColumn(0.46, 1500, 0.30, 1.2, 0.01),
    "C20": WorldCategoryColumn(0.46, 4, 0.50, 0.3, 0.02),
    "C21": WorldCategoryColumn(0.034, 20000, 0.04, 0.7, 0.004),
    "C22": WorldCategoryColumn(0.77, 10, 0.35, 1.55, 0.01),
    "C23": WorldCategoryColumn(0.0, 15, 0.43, 1.2, 0.16),
    "C24": WorldCategoryColumn(0.034, 9000, 0.05, 0.95, 0.004),
    "C25": WorldCategoryColumn(0.46, 80, 0.25, 1.3, 0.02),
    "C26": WorldCategoryColumn(0.46, 9000, 0.07, 0.9, 0.004),
}

INTERACTIONS: tuple[tuple[str, str, float], ...] = (("C6", "C9", 0.01), ("C20", "C22", 0.01), ("C1", "C25", 0.01))
"""Pairs of columns with a weight per pair of (folded) categories, and their share of variance."""
INTERACTION_BUCKETS = 8

DRIFT_COLUMNS = ("C2", "C14", "C17", "C23")
"""The columns that carry most of the signal, and so the ones to rotate if drift is to hurt."""

assert tuple(DENSE_COLUMNS) == DENSE
assert tuple(CATEGORY_COLUMNS) == CATEGORICAL
