"""Triton's names of the models of Criteo's recommender."""

from evergreen.contracts.criteo import CRITEO_RECOMMENDER
from evergreen.contracts.serving import ServedNames
from evergreen.registry.traffic_plan import traffic_file

NAMES = ServedNames(CRITEO_RECOMMENDER.name)
MODEL_NAME, CANDIDATE_NAME, CANARY_NAME = NAMES.model, NAMES.candidate, NAMES.canary
TRAFFIC_FILE = traffic_file(NAMES.model)
