"""The file `recommender.yaml`: reading, checking, writing, drafting from rows, and trying on rows.

The class `evergreen.config.spec.Recommender` contains the values of the file.
`evergreen.registry.recommenders` stores the accepted files.
"""
