"""Controller that can change the served version without a pipeline run.

The controller runs canaries, baking, healing, rollback and promotion.
"""
