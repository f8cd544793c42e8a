"""Controller of the served version between two pipeline runs.

It runs canaries, baking, healing, rollback and promotion.
"""
