"""A feature workflow with given vocabularies. By default, the workflow does not scale numbers."""

import numpy as np

from evergreen.contracts.workflow import FeatureWorkflow
from testing.recommenders import SHOP


def workflow_of(vocabularies, features=SHOP.features, **more) -> FeatureWorkflow:
    """Return a workflow with the categories `vocabularies` by column, and the fields in `more`."""
    numbers = len(features.numeric)
    values = {
        "means": np.zeros(numbers, np.float32),
        "stds": np.ones(numbers, np.float32),
        "frequency_threshold": 1,
        **more,
    }
    arrays = tuple(np.asarray(vocabulary, np.int64) for vocabulary in vocabularies)
    return FeatureWorkflow(features=features, vocabularies=arrays, **values)
