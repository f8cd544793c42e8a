"""The file `recommender.yaml`: reading, checking, writing, drafting from rows, and trying on rows.

`evergreen.config` defines a description. `evergreen.registry.recommenders` stores accepted
descriptions.
"""
