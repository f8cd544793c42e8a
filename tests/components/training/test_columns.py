"""Training refuses a parent of other columns than the recommender's."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from components.contracts.criteo import CRITEO, CRITEO_RECOMMENDER
from components.contracts.workflow import FeatureWorkflow
from components.runtime.errors import ContractError
from components.storage.uris import local_path
from components.training.config import TrainingSettings
from tests.support.training_world import dcn


def test_a_parent_of_other_columns_of_the_same_number_is_refused(train_run, world, make_training_set):
    asked = {"config": dcn(embedding_dim=4, num_cross_layers=1, tower=(8,)), "settings": TrainingSettings()}
    first = train_run(make_training_set(*world.rows(600)[:3], name="first"), name="r1", **asked)
    left, right, *others = CRITEO.categorical
    turned = replace(CRITEO, categorical=(right, left, *others))
    other = make_training_set(*world.rows(600)[:3], name="other")
    path = local_path(other.workflow_uri)
    replace(FeatureWorkflow.load(path), features=turned).save(path)
    recommender = replace(CRITEO_RECOMMENDER, features=turned)
    other = replace(other, recommender=recommender, parent_model_uri=first.uri)
    with pytest.raises(ContractError, match=re.escape("'C2', 'C1', 'C3'")):
        train_run(other, name="r2", **asked)
