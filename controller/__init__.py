"""Controller that changes which version is served between two pipeline runs.

The controller runs canaries, baking, healing, rollback and promotion.
"""
