"""Controller of the served version between two pipeline runs.

The controller runs canaries, baking, healing, rollback and promotion.
"""
