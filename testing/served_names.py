"""Names that the default recommender's models have in Triton."""

from evergreen.contracts.serving import ServedNames
from evergreen.registry.traffic_plan import traffic_file

NAMES = ServedNames("click_model")
MODEL_NAME, CANDIDATE_NAME, CANARY_NAME = NAMES.model, NAMES.candidate, NAMES.canary
TRAFFIC_FILE = traffic_file(NAMES.model)
