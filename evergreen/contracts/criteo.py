"""Features of the Criteo click log. A recommender without a file uses these names.

`evergreen.config.features` defines features.
"""

from evergreen.config.features import Features
from evergreen.config.spec import Recommender
from evergreen.contracts.raw_rows import raw_types

CRITEO = Features(
    numeric=tuple(f"I{i}" for i in range(1, 14)), categorical=tuple(f"C{i}" for i in range(1, 27))
)
CRITEO_RECOMMENDER = Recommender(name="click_model", features=CRITEO)
DENSE = CRITEO.numeric
CATEGORICAL = CRITEO.categorical
FEATURES = CRITEO.names
NUM_DENSE = len(DENSE)
NUM_CATEGORICAL = len(CATEGORICAL)
RAW_TYPES = raw_types(CRITEO)
